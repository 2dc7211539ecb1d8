"""Generations: committed as one thing, found by their manifests."""
