"""Whole runs on a virtual clock, drawn from a seed: interleavings, faults, crashes, and what must hold anyway."""
