"""Generations: committed as one thing, found by their manifests, looked at and checked from the outside, salvaged."""

from pipeline.checkpoint.losses import Loss as Loss
from pipeline.checkpoint.losses import Salvaged as Salvaged
from pipeline.checkpoint.salvage import salvage as salvage
from pipeline.checkpoint.status import Status as Status
from pipeline.checkpoint.status import status_of as status_of
from pipeline.checkpoint.verify import Damage as Damage
from pipeline.checkpoint.verify import Verified as Verified
from pipeline.checkpoint.verify import verify as verify
