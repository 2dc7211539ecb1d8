"""Sources: items by index, marks, and seeds of environments."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pipeline.errors import ConfigError, SourceError
from pipeline.interfaces import Source
from pipeline.records import SourceMark
from tasks import EnvSeeds, JsonlSource, SequenceSource
from tasks.marks import digest

ROWS = [{"n": index, "text": f"row {index}"} for index in range(20)]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def jsonl(path: Path, rows: list[Any]) -> JsonlSource:
    return JsonlSource(write(path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows)))


# --- any sequence


def test_a_sequence_gives_its_items_by_index_and_grows_with_it() -> None:
    rows = list(ROWS)
    source = SequenceSource(rows)
    assert isinstance(source, Source)
    assert [source.item(index) for index in (19, 0, 7)] == [ROWS[19], ROWS[0], ROWS[7]]
    rows.append({"n": 20, "text": "new"})
    assert (source.length(), source.item(20)["text"]) == (21, "new")


@pytest.mark.parametrize("sequence", [range(5), np.arange(10.0).reshape(5, 2), torch.ones(5, 2), ["a", "b"]])
def test_whatever_has_a_length_and_an_index_is_a_sequence(sequence: Any) -> None:
    source = SequenceSource(sequence)
    assert source.length() == len(sequence)
    assert source.mark() == source.mark()


@pytest.mark.parametrize("sequence", [{"a": 1}, "text", {1, 2}, iter([1]), torch.tensor(1.0), None])
def test_what_has_no_length_or_no_index_is_refused(sequence: Any) -> None:
    with pytest.raises(ConfigError, match="sequence of type"):
        SequenceSource(sequence)


@pytest.mark.parametrize("index", [-1, 20, 10**9])
def test_an_item_that_is_not_there_is_an_error_that_says_how_many_there_are(index: int, tmp_path: Path) -> None:
    for source in (SequenceSource(ROWS), jsonl(tmp_path / "a.jsonl", ROWS), EnvSeeds(1, length=20)):
        with pytest.raises(SourceError, match=rf"20 items.*item {index} "):
            source.item(index)


# --- marks


def test_a_mark_holds_the_digests_of_items_at_powers_of_two() -> None:
    assert list(SequenceSource(ROWS, name="rows").mark().digests) == [0, 1, 2, 4, 8, 16]
    assert SequenceSource(ROWS[:16]).mark().digests.keys() == {0, 1, 2, 4, 8}
    assert SequenceSource(ROWS[:1]).mark().digests.keys() == {0}
    assert SequenceSource([]).mark() == SourceMark("sequence", 0, {})
    mark = SequenceSource(ROWS, name="rows").mark()
    assert (mark.kind, mark.length) == ("rows", 20)
    assert all(len(value) == 16 and int(value, 16) >= 0 for value in mark.digests.values())


def test_a_grown_or_corrected_source_is_the_same_and_another_is_not(tmp_path: Path) -> None:
    grown = [*ROWS, {"n": 20, "text": "new"}]
    corrected = [dict(row) for row in ROWS]
    corrected[4]["text"] = "right"
    others = [{"n": -index} for index in range(1, 21)]
    for make in (SequenceSource, lambda rows: jsonl(tmp_path / "b.jsonl", rows)):
        mark = make(ROWS).mark()
        assert mark.agrees(make(grown).mark())
        assert mark.agrees(make(corrected).mark())
        assert mark != make(corrected).mark()
        assert not mark.agrees(make(others).mark())
    assert not SequenceSource(ROWS, "a").mark().agrees(SequenceSource(ROWS, "b").mark())
    assert not EnvSeeds(1).mark().agrees(EnvSeeds(2).mark())
    assert not EnvSeeds(1).mark().agrees(EnvSeeds(1, length=9).mark())
    assert EnvSeeds(1).mark().length == -1


def test_a_moved_file_is_the_same_source(tmp_path: Path) -> None:
    assert jsonl(tmp_path / "a.jsonl", ROWS).mark() == jsonl(tmp_path / "b.jsonl", ROWS).mark()


@dataclasses.dataclass
class Point:
    x: int
    y: Any = None


class Row(msgspec.Struct):
    x: int


class Opaque:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


DIFFERENT: list[Any] = [
    None,
    True,
    1,
    1.0,
    "1",
    2**70,
    -(2**70),
    float("nan"),
    [1],
    [[1]],
    {"a": 1},
    {"a": 2},
    {1: "a"},
    {(1, 2): 3},
    {1, "a", None},
    "\ud800",
    Point(1),
    Point(2, y={"deep": [1]}),
    Row(1),
    np.array([1, 2]),
    np.array([1, 2], dtype=np.int32),
    np.array([[1, 2]]),
    np.array([1, None], dtype=object),
    np.array(3.0),
    torch.tensor([1, 2], dtype=torch.int16),
    torch.tensor([1.5], dtype=torch.bfloat16),
    torch.tensor(True),
    torch.zeros(0, 3),
    Opaque(3),
    Opaque(4),
    object(),
    Ellipsis,
]


def test_items_that_differ_have_different_digests() -> None:
    found: dict[str, Any] = {}
    for value in DIFFERENT:
        assert found.setdefault(digest(value), value) is value, (value, found[digest(value)])


def test_items_that_are_equal_have_one_digest_whatever_holds_them() -> None:
    assert digest({"a": 1, "b": [1, 2]}) == digest({"b": (1, 2), "a": 1})
    assert digest(np.float64(0.5)) == digest(0.5)
    assert digest(np.arange(6).reshape(2, 3)[:, ::-1]) == digest(np.arange(6).reshape(2, 3)[:, ::-1].copy())
    assert digest(object()) == digest(object())
    assert digest({"image": Opaque(3), "n": 1}) != digest({"image": Opaque(3), "n": 2})


def test_an_item_that_cannot_be_walked_counts_by_its_type() -> None:
    deep: list[Any] = []
    deep.append(deep)
    assert digest(deep) == digest([deep])

    class Hostile(dict[str, int]):
        def items(self) -> Any:
            raise OSError("no")

    assert digest(Hostile()) == digest(Hostile())


def test_digests_are_the_same_in_every_process() -> None:
    code = (
        "from tasks.marks import digest\n"
        "import numpy as np\n"
        "print(digest([{'b', 'a', 'c'}, {'z': 1, 'y': object()}, np.array(['x', None], dtype=object)]))"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


def test_a_known_digest_stays_what_it_was() -> None:
    assert digest({"n": 0, "text": "row 0"}) == "46569f5bb8880195"
    assert digest([1, 2.5, None, True, "é", b"x"]) == "ea26a5ea86e5e086"


# --- JSON lines


def test_lines_are_read_by_index_and_blank_ones_are_no_items(tmp_path: Path) -> None:
    text = '\n{"n": 0}\n\n  \t\r\n{"n": 1, "text": "é\\n"}\r\n[1, 2]\n"last"'
    source = JsonlSource(write(tmp_path / "a.jsonl", text))
    assert isinstance(source, Source)
    assert source.length() == 4
    assert [source.item(i) for i in (3, 1, 0, 2)] == ["last", {"n": 1, "text": "é\n"}, {"n": 0}, [1, 2]]


@pytest.mark.parametrize("text", ["", "\n\n", "\ufeff", "\ufeff\n \n"])
def test_a_file_without_items_is_an_empty_source(tmp_path: Path, text: str) -> None:
    source = JsonlSource(write(tmp_path / "a.jsonl", text))
    assert source.length() == 0
    assert source.mark().digests == {}


def test_a_byte_order_mark_is_no_part_of_the_first_item(tmp_path: Path) -> None:
    assert JsonlSource(write(tmp_path / "a.jsonl", '\ufeff{"n": 1}\n{"n": 2}\n')).item(0) == {"n": 1}


def test_items_come_in_any_order_without_the_file_in_memory(tmp_path: Path) -> None:
    rows = [{"n": index, "pad": "x" * (index * 37 % 101)} for index in range(500)]
    source = jsonl(tmp_path / "a.jsonl", rows)
    order = random.Random(3).sample(range(500), 500)
    assert [source.item(index)["n"] for index in order] == order


@pytest.mark.parametrize(
    "bad",
    [b'{"a": 1', b"nan", b'{"a": 1} {"b": 2}', b'"\xff"', b"\xff\xfe", b"1e999", b"[" * 100_000, b"{'a': 1}"],
)
def test_a_bad_line_is_named_by_file_and_line_and_others_are_read(tmp_path: Path, bad: bytes) -> None:
    path = write(tmp_path / "a.jsonl", b'{"n": 0}\n\n\n' + bad + b'\n{"n": 2}\n')
    source = JsonlSource(path)
    assert (source.item(0), source.item(2)) == ({"n": 0}, {"n": 2})
    with pytest.raises(SourceError, match=r"a\.jsonl, line 4 \(item 1\): not JSON"):
        source.item(1)


def test_a_missing_file_is_an_error_when_the_source_is_built(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(SourceError, match=path.name):
            JsonlSource(path)


def test_a_file_that_changed_meanwhile_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    source = jsonl(path, ROWS)
    write(path, path.read_bytes() + b'{"n": 20}\n')
    assert (source.length(), source.item(19)) == (20, ROWS[19])
    assert JsonlSource(path).length() == 21
    write(path, b'{"longer than before": [1, 2, 3]}\n' + path.read_bytes())
    with pytest.raises(SourceError, match="changed since it was opened"):
        source.item(3)
    write(path, b"{}\n")
    with pytest.raises(SourceError, match="changed since it was opened"):
        source.item(19)
    path.unlink()
    with pytest.raises(SourceError, match="cannot be read"):
        source.item(0)


# --- seeds of environments


def test_environments_start_apart_and_the_same_in_every_run() -> None:  # CASES 36
    four = EnvSeeds(42).take(4)
    assert len(set(four)) == 4
    assert EnvSeeds(42).take(4) == four
    assert EnvSeeds(42).take(8)[:4] == four
    assert EnvSeeds(42, length=8).item(2) == EnvSeeds(42, length=4).item(2) == {"seed": four[2]}
    assert isinstance(EnvSeeds(42), Source)


def test_neighbouring_base_seeds_share_no_environment() -> None:
    seen = [seed for base in range(20) for seed in EnvSeeds(base).take(50)]
    assert len(set(seen)) == len(seen)


def test_no_seed_repeats_and_each_fits_in_31_bits() -> None:
    seeds = EnvSeeds(7).take(20_000)
    assert len(set(seeds)) == len(seeds)
    assert min(seeds) >= 0
    assert max(seeds) < 2**31
    assert max(seeds) > 2**30


def test_seeds_never_end_and_any_integer_is_a_base_seed() -> None:
    source = EnvSeeds(-(2**80))
    assert source.length() is None
    assert source.item(2**40) != source.item(2**40 % 2**31)
    assert EnvSeeds(1, length=0).mark().digests == {}
    with pytest.raises(SourceError):
        source.item(-1)
    with pytest.raises(ConfigError, match="length=-1"):
        EnvSeeds(1, length=-1)


def test_known_seeds_stay_what_they_were() -> None:
    assert EnvSeeds(42).take(4) == [919010124, 1444525921, 843861998, 1727635585]


def test_sources_touch_no_global_generator() -> None:
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
    EnvSeeds(1).mark()
    SequenceSource(ROWS).mark()
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
