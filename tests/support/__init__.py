"""Pieces that several test files use."""
