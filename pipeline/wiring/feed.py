"""The seams between a run and the replay buffer that its rollouts fill: what each asks of the other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.locations import Location
from pipeline.records import Added
from pipeline.store.segments import Block

if TYPE_CHECKING:
    from pipeline.checkpoint.generations import Stored
    from pipeline.store.layout import Layout, SegmentKey


class Piece(Protocol):
    """Rows on their way to the disk."""

    @property
    def first(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def blob(self) -> memoryview: ...


class RowsCapture(Protocol):
    """What a generation holds of the buffer, as of one moment."""

    def kept(self) -> list[Block]:
        """Return those of the blocks on the disk that it needs."""
        ...

    def pieces(self) -> Iterator[Piece]:
        """Yield the rows that are to be written. Blocks, and belongs to one thread."""
        ...

    def written(self, blocks: list[Block]) -> tuple[Mapping[str, bytes | memoryview], Mapping[SegmentKey, int]]:
        """Return its files by their paths, and the bytes that it needs by segment; ``blocks`` are where all its rows
        lie. Blocks."""
        ...

    def close(self) -> None:
        """Let rows be overwritten that were not copied."""
        ...


class Reading(Protocol):
    """A buffer as a generation holds it, in memory of its own: nothing of it is in use."""

    def add(self, blob: bytes, event: Added, at: Location, version: int) -> None:
        """Add the rows of a block that came later; of weights no newer than ``version``."""
        ...

    def cut(self, env: int | None) -> None:
        """End the open episode of an environment, or of all."""
        ...


class Feed(Protocol):
    """The side of a replay buffer that its run sees; see :mod:`pipeline.replay.feeding`."""

    def give_back(self) -> None:
        """Take in that the run came to nothing before it was opened: the buffer may be filled by whoever likes."""
        ...

    def extend(self, rows: Any, env: int, version: int) -> tuple[int, int]:
        """Add rows, and return the key of the first, and how many they are."""
        ...

    def encode(self, first: int, count: int) -> memoryview:
        """Return a block of rows that are there, as bytes."""
        ...

    def may_add(self, rows: Any) -> Callable[[], object]:
        """Return what says whether the limiter lets the rows in now."""
        ...

    def wait_for(self, may: Callable[[], object]) -> Awaitable[None]:
        """Wait until ``may`` holds."""
        ...

    @property
    def added(self) -> int:
        """How many rows were ever added."""
        ...

    @property
    def sampled(self) -> int:
        """How many rows were ever drawn, by whichever verb."""
        ...

    def sample(self, count: int, how: Mapping[str, Any]) -> Any:
        """Return a batch, at once.

        Raises:
            Starved: nothing that is there may be drawn so.
            TimedOut: the limiter does not let it out; the error tells when it may.
        """
        ...

    def large(self, count: int, how: Mapping[str, Any]) -> bool:
        """Whether a batch is better drawn in a thread."""
        ...

    def cut(self, env: int | None) -> None:
        """End the open episode of an environment, or of all."""
        ...

    def wrote(self, first: int, count: int, at: Location) -> None:
        """Take in where rows lie."""
        ...

    def lie_in(self, blocks: Sequence[Block]) -> None:
        """Take in where the rows lie that a generation holds."""
        ...

    def capture(self) -> RowsCapture:
        """Capture everything as of now."""
        ...

    def read(self, layout: Layout, run_tag: int, stored: Stored) -> Reading:
        """Read what a generation holds. Blocks.

        Raises:
            Damaged: it cannot be read.
            UsageError: the rows there are not those of this buffer.
        """
        ...

    def adopt(self, reading: Reading) -> None:
        """Go on with what was read."""
        ...

    def statistics(self) -> Any:
        """Return how the buffer stands."""
        ...


class Fillable(Protocol):
    """A buffer that a run can fill, such as :class:`~pipeline.ReplayBuffer`."""

    def feed(self) -> Feed:
        """Return the side of it that the run sees; from then on nobody else adds rows.

        Raises:
            ConfigError: an option of it is in the way.
            UsageError: it holds rows already.
        """
        ...
