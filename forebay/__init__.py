"""Forebay: asynchronous rollouts, a replay buffer, and training that goes on after ``kill -9``.

Everything public in one place: the engine from ``pipeline``, runners and sources from ``tasks``.
"""

import importlib
from types import ModuleType


def _ours(name: str) -> ModuleType:
    """Import one of this distribution's packages, and say which file hides it if another one is found."""
    module = importlib.import_module(name)
    path = getattr(module, "__file__", None) or ""
    if not hasattr(module, "__path__"):
        raise ImportError(
            f"forebay needs its own package {name!r}, but {path} hides it. Rename that file (or move it out of "
            f"the folder that Python searches first) and try again."
        )
    return module


_ours("pipeline")
_ours("tasks")

from pipeline import Anneal as Anneal  # noqa: E402
from pipeline import Batch as Batch  # noqa: E402
from pipeline import ChoosingSource as ChoosingSource  # noqa: E402
from pipeline import Client as Client  # noqa: E402
from pipeline import ClosedError as ClosedError  # noqa: E402
from pipeline import Column as Column  # noqa: E402
from pipeline import Committed as Committed  # noqa: E402
from pipeline import ConfigError as ConfigError  # noqa: E402
from pipeline import Context as Context  # noqa: E402
from pipeline import Control as Control  # noqa: E402
from pipeline import Damaged as Damaged  # noqa: E402
from pipeline import EndOfSource as EndOfSource  # noqa: E402
from pipeline import Evaluation as Evaluation  # noqa: E402
from pipeline import FailFast as FailFast  # noqa: E402
from pipeline import Fields as Fields  # noqa: E402
from pipeline import ForebayError as ForebayError  # noqa: E402
from pipeline import Group as Group  # noqa: E402
from pipeline import GroupsRejected as GroupsRejected  # noqa: E402
from pipeline import Hindsight as Hindsight  # noqa: E402
from pipeline import Item as Item  # noqa: E402
from pipeline import LearningSource as LearningSource  # noqa: E402
from pipeline import Limiter as Limiter  # noqa: E402
from pipeline import Locked as Locked  # noqa: E402
from pipeline import MixedBatch as MixedBatch  # noqa: E402
from pipeline import MixedReplay as MixedReplay  # noqa: E402
from pipeline import NewerFormat as NewerFormat  # noqa: E402
from pipeline import NotARun as NotARun  # noqa: E402
from pipeline import NotServed as NotServed  # noqa: E402
from pipeline import Ordered as Ordered  # noqa: E402
from pipeline import OtherRun as OtherRun  # noqa: E402
from pipeline import PeerLost as PeerLost  # noqa: E402
from pipeline import Pipeline as Pipeline  # noqa: E402
from pipeline import PipelineOptions as PipelineOptions  # noqa: E402
from pipeline import Prioritized as Prioritized  # noqa: E402
from pipeline import ProcessEngine as ProcessEngine  # noqa: E402
from pipeline import Progress as Progress  # noqa: E402
from pipeline import ProgressBar as ProgressBar  # noqa: E402
from pipeline import RankFailed as RankFailed  # noqa: E402
from pipeline import RankLost as RankLost  # noqa: E402
from pipeline import Ranks as Ranks  # noqa: E402
from pipeline import RayEngine as RayEngine  # noqa: E402
from pipeline import Remove as Remove  # noqa: E402
from pipeline import ReplayBuffer as ReplayBuffer  # noqa: E402
from pipeline import ReplayDataset as ReplayDataset  # noqa: E402
from pipeline import Reroll as Reroll  # noqa: E402
from pipeline import Resumed as Resumed  # noqa: E402
from pipeline import Retry as Retry  # noqa: E402
from pipeline import Rollout as Rollout  # noqa: E402
from pipeline import RolloutFailed as RolloutFailed  # noqa: E402
from pipeline import RolloutInvalid as RolloutInvalid  # noqa: E402
from pipeline import RunnerRaised as RunnerRaised  # noqa: E402
from pipeline import Schema as Schema  # noqa: E402
from pipeline import Serving as Serving  # noqa: E402
from pipeline import ServingError as ServingError  # noqa: E402
from pipeline import Skip as Skip  # noqa: E402
from pipeline import Slices as Slices  # noqa: E402
from pipeline import Source as Source  # noqa: E402
from pipeline import SourceMark as SourceMark  # noqa: E402
from pipeline import SourceMismatch as SourceMismatch  # noqa: E402
from pipeline import StalenessWeighted as StalenessWeighted  # noqa: E402
from pipeline import Starved as Starved  # noqa: E402
from pipeline import Stateful as Stateful  # noqa: E402
from pipeline import Stopped as Stopped  # noqa: E402
from pipeline import StoreError as StoreError  # noqa: E402
from pipeline import Stream as Stream  # noqa: E402
from pipeline import SyncPipeline as SyncPipeline  # noqa: E402
from pipeline import Task as Task  # noqa: E402
from pipeline import TimedOut as TimedOut  # noqa: E402
from pipeline import Trace as Trace  # noqa: E402
from pipeline import TrajectoryBuffer as TrajectoryBuffer  # noqa: E402
from pipeline import TrajectoryOptions as TrajectoryOptions  # noqa: E402
from pipeline import TransitionBatch as TransitionBatch  # noqa: E402
from pipeline import Uniform as Uniform  # noqa: E402
from pipeline import UsageError as UsageError  # noqa: E402
from pipeline import WithoutReplacement as WithoutReplacement  # noqa: E402
from pipeline import WorkerDied as WorkerDied  # noqa: E402
from pipeline import WorkerFailed as WorkerFailed  # noqa: E402
from pipeline import WriteFailed as WriteFailed  # noqa: E402
from pipeline import ZeroVariance as ZeroVariance  # noqa: E402
from pipeline import configure as configure  # noqa: E402
from pipeline import connect as connect  # noqa: E402
from pipeline import intervention_pieces as intervention_pieces  # noqa: E402
from pipeline import recorded_batches as recorded_batches  # noqa: E402
from tasks import EnvSeeds as EnvSeeds  # noqa: E402
from tasks import JsonlSource as JsonlSource  # noqa: E402
from tasks import NStep as NStep  # noqa: E402
from tasks import SequenceSource as SequenceSource  # noqa: E402
from tasks import chat as chat  # noqa: E402
from tasks import n_step as n_step  # noqa: E402
from tasks import threaded as threaded  # noqa: E402
