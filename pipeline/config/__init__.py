"""Options: frozen, keyword-only, checked when built, and back from plain dicts as they went in."""

from pipeline.config.base import LEAST as LEAST
from pipeline.config.base import MOST as MOST
from pipeline.config.base import Options as Options
from pipeline.config.pipeline import Durability as Durability
from pipeline.config.pipeline import PipelineOptions as PipelineOptions
from pipeline.config.policies import FailFast as FailFast
from pipeline.config.policies import FailurePolicy as FailurePolicy
from pipeline.config.policies import Reroll as Reroll
from pipeline.config.policies import Retry as Retry
from pipeline.config.policies import Skip as Skip
from pipeline.config.policies import StalenessPolicy as StalenessPolicy
from pipeline.config.policies import ZeroVariance as ZeroVariance
from pipeline.config.policies import failure_policy as failure_policy
from pipeline.config.policies import staleness_policy as staleness_policy
from pipeline.config.triggers import calendar_time as calendar_time
from pipeline.config.triggers import check_signals as check_signals
