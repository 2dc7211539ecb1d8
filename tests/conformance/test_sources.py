"""What every source promises, run over each: see ``pipeline.interfaces.Source``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import Source
from tasks import EnvSeeds, JsonlSource, SequenceSource


def jsonl(path: Path, count: int) -> Source:
    path.write_text("".join(json.dumps({"n": number}) + "\n" for number in range(count)))
    return JsonlSource(path)


MAKERS: dict[str, Callable[[Path], Source]] = {
    "sequence": lambda folder: SequenceSource([{"n": number} for number in range(20)]),
    "json lines": lambda folder: jsonl(folder / "items.jsonl", 20),
    "seeds": lambda folder: EnvSeeds(7, 20),
    "endless seeds": lambda folder: EnvSeeds(7),
}
every = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


@every
def test_an_item_is_the_same_at_each_call_and_from_each_source(make: Callable[[Path], Source], tmp_path: Path) -> None:
    source, again = make(tmp_path), make(tmp_path)
    assert isinstance(source, Source)
    indices = [3, 0, 19, 3, 7]
    assert [source.item(index) for index in indices] == [again.item(index) for index in indices]
    assert len({repr(source.item(index)) for index in range(20)}) == 20


@every
def test_its_mark_is_stable_and_agrees_with_no_other(make: Callable[[Path], Source], tmp_path: Path) -> None:
    source = make(tmp_path)
    assert source.mark() == make(tmp_path).mark()
    assert source.mark().agrees(source.mark())
    assert source.mark().length == (-1 if source.length() is None else source.length())
    for other in (EnvSeeds(8), EnvSeeds(8, 20), SequenceSource(["a", "b", "c"])):
        assert not source.mark().agrees(other.mark())
