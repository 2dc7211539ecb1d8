"""Wires the components into a run: the only package in which they meet."""
