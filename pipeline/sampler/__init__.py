"""What comes next, and how far a run is."""

from pipeline.sampler.progress import Progress as Progress
from pipeline.sampler.sampler import Draw as Draw
from pipeline.sampler.sampler import DrawPlan as DrawPlan
from pipeline.sampler.sampler import Sampler as Sampler
from pipeline.sampler.turns import Block as Block
from pipeline.sampler.turns import TurnSampler as TurnSampler
from pipeline.sampler.xtuner import ImportedProgress as ImportedProgress
from pipeline.sampler.xtuner import read_xtuner_progress as read_xtuner_progress
