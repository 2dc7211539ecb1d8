"""Drawing in proportion to priorities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from pipeline.buffer.transitions.drawing import Drawer, Floats, Ints
from pipeline.buffer.transitions.given import MOST, mass, masses, whole
from pipeline.buffer.transitions.ring import Ring
from pipeline.buffer.transitions.sums import SumTree
from pipeline.buffer.transitions.unread_sums import UnreadSums
from pipeline.config import Anneal, Prioritized
from pipeline.errors import ConfigError, Starved

_LEAST = float(np.nextafter(0.0, 1.0))


class PriorityDrawer(Drawer):
    """Row i with probability ``p_i^alpha / sum_k p_k^alpha``; see :class:`~pipeline.config.Prioritized`."""

    def __init__(self, ring: Ring, options: Prioritized, new_tree: Callable[[int], SumTree] = SumTree) -> None:
        super().__init__(ring)
        self.options = options
        if not isinstance(options.new, str):
            self._powers("new", np.array([options.new], np.float64))
        self._new_tree = new_tree
        self.tree = new_tree(ring.capacity)
        self.batches = 0
        """How many batches were drawn: the position of an annealed exponent."""
        self._floor, self._floor_until = (
            0.0,
            0,
        )  # what new rows are worth at least, while a row before that key is there
        self._ever = 0.0  # the largest priority that there ever was, to the power of alpha
        self._pending = ring.added  # rows from this key on are not in the tree yet

    @property
    def beta(self) -> float:
        """The exponent of the weights for the next batch."""
        beta = self.options.beta
        return beta.at(self.batches) if isinstance(beta, Anneal) else beta

    def added(self, first: int, count: int) -> None:
        self._pending = min(self._pending, first)  # one row at a time would cost more than its copy

    def _settle(self) -> None:
        """Give the rows that are new their priority: nothing has changed since they came."""
        ring = self.ring
        if ring.scattered:
            self._settle_slots()
            return
        first = max(self._pending, ring.oldest)
        count = ring.added - first
        self._pending = ring.added
        if count <= 0:
            return
        value = self._new()
        self._ever = max(self._ever, value)
        begin = first % ring.capacity
        room = min(ring.capacity - begin, count)
        self.tree.fill(begin, begin + room, value)
        self.tree.fill(0, count - room, value)

    def _settle_slots(self) -> None:
        """As :meth:`_settle`, where new rows lie in any slots."""
        first, self._pending = self._pending, self.ring.added
        if first < self.ring.added:
            value = self._new()
            self._ever = max(self._ever, value)
            self._set(self.ring.slots(self.ring.newest(first, self.ring.added - first)), value)

    def _set(self, slots: Ints, values: Floats | float) -> None:
        self.tree.set(slots, np.broadcast_to(values, slots.shape) if isinstance(values, float) else values)
        if self.ring.scattered:  # in a ring the oldest go first, whatever they are worth
            self.ring.revalued(slots, self.tree.values[slots])

    def new_value(self) -> float:
        """Return the value that a row gets which is added now."""
        self._settle()
        return self._new()

    def _new(self) -> float:
        """The value of a new row: its priority to the power of alpha."""
        new = self.options.new
        if new == "current_max":
            return max(self.tree.most, self._floor if self.ring.oldest < self._floor_until else 0.0) or 1.0
        if new == "all_time_max":
            return max(self._ever, 1.0)
        return float(self._powers("new", np.array([new], np.float64))[0])

    def _powers(self, option: str, priorities: Floats) -> Floats:
        """Return priorities to the power of alpha.

        Raises:
            ConfigError: one is so large that sums of such would be infinite.
        """
        given = priorities + self.options.eps
        with np.errstate(over="ignore", under="ignore"):
            values = given**self.options.alpha
        # What is more than 0 stays so, whatever is lost to rounding; and 0 to the power of 0 is not 1 here.
        if not np.minimum.reduce(given, initial=np.inf) > 0:
            values = np.where(given > 0, np.maximum(values, _LEAST), 0.0)
        else:
            np.maximum(values, _LEAST, out=values)
        most = self._most
        if not np.maximum.reduce(values, initial=0.0) <= most:
            wrong = np.flatnonzero(~(values <= most))
            raise ConfigError.of(
                option,
                float(priorities[wrong[0]]),
                f"to the power of alpha={self.options.alpha:g}, at most {most:g} is needed; scale priorities down",
            )
        return values

    @property
    def _most(self) -> float:
        """The largest value: sums of so many are finite."""
        return float(np.finfo(np.float64).max) / (2 * self.ring.capacity)

    def _of_alpha(self, was: float, values: Floats) -> Floats:
        """Return priorities to the power of alpha, of those to the power of another one; where that was 0 they are not
        known any more, and stay alike."""
        if was in (0.0, self.options.alpha):
            if values.max(initial=0) > self._most:  # the capacity was a smaller one
                values = np.minimum(values, self._most)
            return values
        with np.errstate(over="ignore", under="ignore"):
            powers = np.clip(values ** (self.options.alpha / was), _LEAST, self._most)
        return np.where(values > 0, powers, 0.0)

    def draw(self, rng: np.random.Generator, count: int, starts: Any = None) -> Ints:
        self._settle()
        keys = super().draw(rng, count, starts)
        self.batches += 1
        return keys

    def before(self) -> int:
        return self.batches

    def undo(self, before: int) -> None:
        self.batches = before

    def _any(self, rng: np.random.Generator, count: int) -> Ints:
        total = self.tree.total
        if not total > 0:
            raise Starved("every priority is 0, so no row can be drawn; update_priorities, or build with eps=")
        return self.ring.key_at(self.tree.find(rng.random(count) * total))

    def looks_at(self, count: int) -> int:
        return count + self.ring.added - self._pending

    def mass(self, keys: Ints) -> Floats:
        self._settle()
        mass: Floats = self.tree.values[self.ring.slots(keys)]
        return mass

    def weights(self, keys: Ints) -> Floats:
        # (N P_i)^-beta over the largest of them: N and the total cancel out.
        values = self.tree.values[self.ring.slots(keys)]
        least = self.tree.least if self.options.weights == "buffer" else values.min(initial=np.inf)
        beta = self.options.beta
        exponent = beta.at(self.batches - 1) if isinstance(beta, Anneal) else beta
        weights: Floats = (least / values) ** exponent
        return weights

    takes_priorities = True

    def check_priorities(self, priorities: Floats) -> None:
        self._powers("priorities", priorities)

    def update(self, keys: Ints, priorities: Floats) -> None:
        self._settle()
        values = self._powers("priorities", priorities)
        self._ever = max(self._ever, float(np.maximum.reduce(values, initial=0.0)))
        self._set(self.ring.slots(keys), values)

    def state(self) -> dict[str, Any]:
        self._settle()
        state = {"batches": self.batches, "ever": self._ever, "alpha": self.options.alpha, "most": self.tree.most}
        if self.ring.oldest < self._floor_until:
            state |= {"floor": self._floor, "floor_until": self._floor_until}
        return state

    def arrays(self) -> dict[str, np.ndarray]:
        self._settle()
        if self.ring.scattered:
            return {"priorities": self.tree.values[self.ring.slots(self.ring.keys())]}
        begin, end = self.ring.oldest % self.ring.capacity, self.ring.size
        values, room = self.tree.values, self.ring.capacity - begin
        return {"priorities": np.concatenate([values[begin : begin + end], values[: max(0, end - room)]])}

    def rebuild(self) -> None:  # from the values of the rows that there are; those of others are nothing
        values = np.zeros(self.ring.capacity)
        slots = self.ring.slots(self.ring.keys())
        values[slots] = self.tree.values[slots]
        self.tree.fill(0, self.ring.capacity, values)

    def load(self, state: dict[str, Any], arrays: dict[str, Any]) -> None:
        """As of any drawer; the priorities may lie elsewhere, and stay there."""
        given: Any = arrays.get("priorities")
        unread = bool(state) and self.ring.size > 0 and not isinstance(given, np.ndarray | None)
        self.tree = self._new_tree(1 if unread else self.ring.capacity)  # one or the other is in memory
        self.tree.empty()
        if not state:  # rows that were drawn in another way before: all of them are new here
            self._pending = self.ring.oldest
            return
        was = mass("alpha", state.get("alpha", self.options.alpha))
        self.batches = whole("batches", state["batches"], 0, MOST)
        self._floor_until = whole("floor_until", state.get("floor_until", 0), 0, MOST)
        known = np.array([mass("ever", state["ever"]), mass("floor", state.get("floor", 0.0))])
        self._ever, self._floor = self._of_alpha(was, known).tolist()
        self._pending = self.ring.added
        if not self.ring.size:
            return
        if not unread:
            self._load(self._of_alpha(was, masses("priorities", arrays["priorities"])))
            return
        begin, of = self.ring.oldest % self.ring.capacity, partial(self._of_alpha, was)
        self.tree = UnreadSums(self.ring.capacity, given, begin, of=of, name="priorities")

    def _load(self, priorities: Floats) -> None:
        """Set the values of all rows, oldest first; of more, which are gone, they come before."""
        if self.ring.scattered:
            self._set(self.ring.slots(self.ring.keys()), priorities)
            return
        values = priorities[-self.ring.size :]
        begin = self.ring.oldest % self.ring.capacity
        room = min(self.ring.capacity - begin, len(values))
        self.tree.fill(begin, begin + room, values[:room])
        self.tree.fill(0, len(values) - room, values[room:])

    def clear(self) -> None:
        self.tree = self._new_tree(self.ring.capacity)
        self._pending = self.ring.added

    @property
    def numbers(self) -> tuple[float, ...]:
        return self.batches, self._ever, self._pending

    @numbers.setter
    def numbers(self, numbers: Sequence[float]) -> None:
        self.batches, self._ever, self._pending = int(numbers[0]), numbers[1], int(numbers[2])
