"""What a selection goes on from, where rows of several buffers come together: what each row is worth travels with it,
if all of them were selected in one way."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from pipeline.checkpoint.generations import Stored
from pipeline.errors import UsageError
from pipeline.replay.state import VALUES_FOLDER, BufferState


def extras_of(stored: Stored) -> set[str]:
    """Return the names of the files of what a buffer's selection has of each row; but for an order of keys."""
    names = {info.path.removeprefix(f"{VALUES_FOLDER}/") for info in stored.manifest.files}
    return {name for name in names if name.startswith("selector.") and not name.startswith("selector.order.")}


class Selected(NamedTuple):
    """What several buffers have in common.

    Attributes:
        selection: the tag of the kind of draws; empty: rows are new to whatever selects them.
        extras: names of the files of what there is of each row.
        states: those of buffers that have rows.
        left_out: what is not taken over, and why.
    """

    selection: str
    extras: list[str]
    states: list[BufferState]
    left_out: dict[str, str]

    def state(self, added: int, most: float | None = None) -> dict[str, Any]:
        """Return the selection's state.

        Args:
            added: rows that were ever added to the new buffer.
            most: what the most valuable row of it is worth; None: as much as that of any of the old ones, which then is
                what new rows are worth at least.
        """
        if self.selection != "prioritized" or not self.extras:
            return {}
        states = [state.selector for state in self.states]
        floors = [float(state["floor"]) for state in states if "floor" in state]
        highest = max(float(state.get("most", 0.0)) for state in states)
        if most is None:
            floors = [highest]
        return {
            "batches": max(state["batches"] for state in states),
            "ever": max(state["ever"] for state in states),
            "alpha": states[0]["alpha"],
            **({} if most is None else {"most": most}),
            **({"floor": max(floors), "floor_until": added} if floors else {}),
        }


def selection_of(states: Sequence[BufferState], extras: Sequence[AbstractSet[str]]) -> Selected:
    """Return what buffers have in common.

    Args:
        states: of all of them.
        extras: by buffer, the names of the files of what there is of each row.

    Raises:
        UsageError: priorities were raised to different powers.
    """
    having = [number for number, state in enumerate(states) if state.size]
    used = [states[number] for number in having]
    tags = list(dict.fromkeys(state.selection for state in used or states))
    if len(tags) != 1:
        # imported rows may not say how they are to be sampled; uniformly there is nothing to be kept of that
        said = ", ".join(tag or "not said" for tag in tags)
        different = {"selection": f"the buffers were sampled in different ways: {said}"}
        why = {} if set(tags) == {"", "uniform"} else different
        return Selected("", [], used, why)
    if not used:
        return Selected(tags[0], [], used, {})
    alphas = {state.selector["alpha"] for state in used if "alpha" in state.selector}
    if len(alphas) > 1:
        raise UsageError(f"buffers were saved with different alphas: {sorted(alphas)}; save them with one")
    names = sorted(set.intersection(*(set(extras[number]) for number in having)))
    lacking = sorted(set.union(*(set(extras[number]) for number in having)) - set(names))
    why = dict.fromkeys(lacking, "not every buffer says it of its rows")
    if tags == ["prioritized"]:  # what says the most of a row comes first
        names.sort(key=lambda name: not name.startswith("selector.priorities"))
    return Selected(tags[0] if names or tags == ["uniform"] else "", names, used, why)
