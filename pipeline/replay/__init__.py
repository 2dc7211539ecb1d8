"""Buffer and checkpoint wired together, for use without a pipeline."""

from pipeline.replay.buffer import ReplayBuffer as ReplayBuffer
from pipeline.replay.buffer import ReplayStatistics as ReplayStatistics
from pipeline.replay.buffer import Updated as Updated
