"""Buffer and checkpoint wired together, for use without a pipeline."""

from pipeline.replay.buffer import ReplayBuffer as ReplayBuffer
from pipeline.replay.buffer import ReplayStatistics as ReplayStatistics
from pipeline.replay.buffer import Updated as Updated
from pipeline.replay.dataset import ReplayDataset as ReplayDataset
from pipeline.replay.flattening import TrajectoryInfo as TrajectoryInfo
from pipeline.replay.flattening import intervention_pieces as intervention_pieces
from pipeline.replay.handles import ReplayHandle as ReplayHandle
from pipeline.replay.mixed import MixedReplay as MixedReplay
from pipeline.replay.mixed import MixtureStatistics as MixtureStatistics
from pipeline.replay.trajectories import TrajectoryBuffer as TrajectoryBuffer
from pipeline.replay.write_back import WrittenBack as WrittenBack
