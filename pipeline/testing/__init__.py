"""For tests of code that uses the library, and of the library itself: a virtual clock, faults and fakes. Public."""

from pipeline.testing.clock import VirtualClockLoop as VirtualClockLoop
from pipeline.testing.exact import Report as Report
from pipeline.testing.exact import assert_exact_resume as assert_exact_resume
from pipeline.testing.fakes import FakeTrainer as FakeTrainer
from pipeline.testing.fakes import Numbers as Numbers
from pipeline.testing.fakes import item_key as item_key
from pipeline.testing.faults import Cancel as Cancel
from pipeline.testing.faults import Fail as Fail
from pipeline.testing.faults import FailingFiles as FailingFiles
from pipeline.testing.faults import Hang as Hang
from pipeline.testing.faults import KillingFiles as KillingFiles
from pipeline.testing.faults import Return as Return
from pipeline.testing.faults import ScriptedFault as ScriptedFault
from pipeline.testing.faults import Slow as Slow
from pipeline.testing.faults import faulty as faulty
from pipeline.testing.recording import RecordingFiles as RecordingFiles
from pipeline.testing.recording import Replay as Replay
