"""The side of a worker process: what runs there. Imports little, so that a worker starts at once and stays small."""
