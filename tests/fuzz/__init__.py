"""Whatever bytes a reader of ours is given: it returns, or raises an error of ours that names the place."""
