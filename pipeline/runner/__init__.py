"""Runs attempts: the pool of workers, what a runner sees, and what follows a failure."""
