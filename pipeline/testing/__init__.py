"""For tests of code that uses the library, and of the library itself: a virtual clock and fakes. Public."""

from pipeline.testing.clock import VirtualClockLoop as VirtualClockLoop
