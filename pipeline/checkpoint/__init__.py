"""Generations: committed as one thing, found by their manifests, and checked from the outside."""

from pipeline.checkpoint.verify import Damage as Damage
from pipeline.checkpoint.verify import Verified as Verified
from pipeline.checkpoint.verify import verify as verify
