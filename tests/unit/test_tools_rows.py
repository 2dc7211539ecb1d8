"""Merging and splitting buffers of transitions: nothing lost, nothing doubled, and in order."""

from __future__ import annotations

import itertools
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import Prioritized, ReplayBuffer
from pipeline.buffer.transitions import blocks
from pipeline.checkpoint.generations import find_generations
from pipeline.cli import main
from pipeline.errors import ConfigError, Damaged, NotARun, UsageError
from pipeline.store.held import HeldSegments
from pipeline.store.layout import Layout
from pipeline.store.segments import Block
from pipeline.tools import merge, routing, split
from pipeline.tools.exporting import export
from pipeline.tools.importing import import_data
from tests.support.keeping import PRIORITIZED, digest, everything, load, odd_rows, play, rows_by_id
from tests.support.ranks import fine, on_ranks


def manifest_of(directory: Path) -> Any:
    layout = Layout(str(directory))
    run = layout.read_run()
    assert run is not None
    return find_generations(layout, run.run_id).complete[-1].manifest


@pytest.mark.parametrize("select", ["uniform", PRIORITIZED], ids=["uniform", "prioritized"])
@pytest.mark.parametrize(
    "how", [{"count": 5}, {"count": 0}, {"fraction": 0.5}, {"where": "t < 9 and reward >= 0"}], ids=str
)
def test_what_was_split_and_merged_is_what_it_was(tmp_path: Path, how: dict[str, Any], select: Any) -> None:
    """Every bit of it: order, keys, episodes and their numbers, ends, versions, places, links, priorities, open ones;
    also where the start of an episode was overwritten."""
    before = play(tmp_path / "a", 1, 40, envs=3, capacity=70, select=select)
    was = digest(tmp_path / "a")
    parts = [tmp_path / "first", tmp_path / "rest"]
    made = split(tmp_path / "a", parts, **how)
    assert sum(each.rows for each in made) == 70
    back = merge(parts, tmp_path / "back")
    assert back.renumbered == 0
    assert load(tmp_path / "back", select=select, capacity=70) == before
    assert digest(tmp_path / "a") == was


def test_the_grouping_and_the_order_of_arguments_do_not_matter(tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("rank_1", "rank_2", "rank_10")]
    for number, run in enumerate(runs):
        play(run, number + 1, 20 + 7 * number, select=PRIORITIZED)
    a, b, c = runs
    merge([a, b, c], tmp_path / "at once")
    merge([a, b], tmp_path / "ab")
    merge([tmp_path / "ab", c], tmp_path / "left")
    merge([c, b], tmp_path / "cb")
    merge([tmp_path / "cb", a], tmp_path / "right")
    found = [load(tmp_path / name, select=PRIORITIZED) for name in ("at once", "left", "right")]
    assert found[0] == found[1] == found[2]
    parts = [
        [part["directory"] for part in json.loads((tmp_path / name / "ids.json").read_text())["parts"]]
        for name in ("at once", "right")
    ]
    assert parts[0] == parts[1] == [str(run) for run in runs]


def test_nor_where_only_some_have_episodes_of_one_number(tmp_path: Path) -> None:
    """The third run has lost its first episodes, so that its numbers are others than those of the first two."""
    for run, steps in ((1, 8), (2, 8), (3, 60)):
        play(tmp_path / str(run), run, steps, envs=1, capacity=20)
    merge([tmp_path / "1", tmp_path / "2", tmp_path / "3"], tmp_path / "at once")
    merge([tmp_path / "1", tmp_path / "2"], tmp_path / "12")
    merge([tmp_path / "12", tmp_path / "3"], tmp_path / "left")
    merge([tmp_path / "1", tmp_path / "3"], tmp_path / "13")
    merge([tmp_path / "13", tmp_path / "2"], tmp_path / "right")
    found = [load(tmp_path / name) for name in ("at once", "left", "right")]
    assert found[0] == found[1] == found[2]


def test_nor_where_only_some_have_environments_of_one_number(tmp_path: Path) -> None:
    """Open episodes, and environments that wait for their reset."""
    for run, envs in (("1", [0]), ("2", [0]), ("3", [5]), ("4", [5, 6])):
        with ReplayBuffer(50, directory=tmp_path / run, seed=1) as buffer:
            buffer.resume()
            for env in envs:
                buffer.extend(odd_rows(int(run), env, 1, done=[env == 6]), env=env)
            buffer.save(1, wait=True)
    runs = [tmp_path / run for run in "1234"]
    merge(runs, tmp_path / "at once")
    merge([merge(runs[:2], tmp_path / "12").directory, *runs[2:]], tmp_path / "left")
    merge([merge(runs[1:3], tmp_path / "23").directory, runs[3], runs[0]], tmp_path / "right")
    found = [load(tmp_path / name) for name in ("at once", "left", "right")]
    assert [each[0] for each in found[0]["open"][0]] == [0, 1, 2, 3]
    assert found[0] == found[1] == found[2]
    split(tmp_path / "left", [tmp_path / "x", tmp_path / "y"], count=2)
    assert [each[0] for each in load(tmp_path / "y")["open"][0]] == [0, 1]
    merge([tmp_path / "x", tmp_path / "y"], tmp_path / "back")
    assert load(tmp_path / "back") == found[0]


def test_of_each_id_one_run_after_the_other_in_numeric_order(tmp_path: Path) -> None:
    """Ten shards, rank_10 after rank_2; an id is the number that a row had in its run."""
    runs = [tmp_path / f"rank_{number}" for number in (0, 1, 10, 2, 3, 4, 5, 6, 7, 8, 9)]
    for run in runs:
        play(run, int(run.name.removeprefix("rank_")), 4, envs=1)
    merge(runs, tmp_path / "all")
    assert load(tmp_path / "all")["id"] == [(run, t) for t in range(4) for run in range(11)]


def test_nothing_is_lost_or_doubled_and_totals_are_sums(tmp_path: Path) -> None:
    """Case 132: totals and the maximum after a merge come from all of the parts."""
    wanted: dict[Any, Any] = {}
    played = [play(tmp_path / str(run), run, steps, envs=2) for run, steps in ((1, 12), (2, 30), (3, 3))]
    for each in played:
        wanted |= rows_by_id(each)
    made = merge([tmp_path / "1", tmp_path / "2", tmp_path / "3"], tmp_path / "all")
    found = load(tmp_path / "all")
    assert rows_by_id(found) == wanted
    assert made.rows == len(found["keys"]) == sum(len(each["keys"]) for each in played)
    assert found["counts"] == tuple(sum(each["counts"][at] for each in played) for at in (0, 1))
    numbers = {int.from_bytes(each, "little") for each in found["#episode"]}
    assert len(numbers) == made.units
    assert max(numbers) < found["open"][1]
    assert manifest_of(tmp_path / "all").step == 4


def test_a_row_without_the_one_before_it_leads_to_no_other_episode(tmp_path: Path) -> None:
    """The starts of episodes are overwritten, and rows of other runs lie where they were."""
    for run in (1, 2):
        play(tmp_path / str(run), run, 40, envs=3, capacity=70)
    merge([tmp_path / "1", tmp_path / "2"], tmp_path / "m")
    found = load(tmp_path / "m")
    at = {key: number for number, key in enumerate(found["keys"])}
    places = [int.from_bytes(each, "little") for each in found["#place"]]
    for number, key in enumerate(found["keys"]):
        chain = [key, *(each for each in found["back"][number] if each >= 0 and each != key)]
        chain = [found["following"][number], *chain] if found["following"][number] in at else chain
        assert len({found["#episode"][at[each]] for each in chain}) == 1
        assert np.all(np.diff([places[at[each]] for each in chain]) == -1)


def stepped(directory: Path, done: list[bool]) -> None:
    """Save one step of some environments, which reset with the next one if they are done."""
    count = len(done)
    obs, zeros = np.zeros((count, 1), np.float32), np.zeros(count)
    with ReplayBuffer(50, directory=directory, seed=1) as buffer:
        buffer.resume()
        buffer.add(obs, zeros, obs + 1, zeros, np.array(done), np.zeros(count, bool), {}, autoreset="next_step")
        buffer.save(1, wait=True)


def environments(directory: Path) -> tuple[list[int], list[int]]:
    """The environments whose next step is their reset, and those that have an open episode."""
    with ReplayBuffer(50, directory=directory, seed=1) as buffer:
        buffer.resume(continue_episodes=True)
        return buffer.stepping.state(), [env for env, *_ in buffer.ring.episodes.state()]


def test_environments_that_are_to_be_reset_are_told_from_those_that_go_on(tmp_path: Path) -> None:
    stepped(tmp_path / "a", [True, False])
    stepped(tmp_path / "b", [False])
    merge([tmp_path / "a"], tmp_path / "alone")
    assert environments(tmp_path / "alone") == environments(tmp_path / "a") == ([0], [1])
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m")  # the first is to be reset in one, and goes on in the other
    assert environments(tmp_path / "m") == ([2], [0, 1])
    named = json.loads((tmp_path / "m" / "ids.json").read_text())["environments"]
    assert [(now, Path(run).name, env) for now, run, env in named] == [(0, "a", 1), (1, "b", 0), (2, "a", 0)]


def test_updates_that_came_too_late_are_counted_together(tmp_path: Path) -> None:
    for run, late in (("a", [0, 1]), ("b", [0])):
        with ReplayBuffer(4, directory=tmp_path / run, select=PRIORITIZED, seed=1) as buffer:
            buffer.resume()
            for t in range(8):
                buffer.extend(odd_rows(ord(run), t, 1, done=[True]))
            buffer.update_priorities(np.array(late), np.ones(len(late)))
            buffer.save(1, wait=True)
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m")
    with ReplayBuffer(9, directory=tmp_path / "m", select=PRIORITIZED, seed=1) as buffer:
        buffer.resume()
        assert buffer.statistics().stale_updates == 3


def test_five_episodes_of_three_and_two(tmp_path: Path) -> None:
    """Case 132, as it stands there."""
    for run, episodes in ((1, 3), (2, 2)):
        with ReplayBuffer(100, directory=tmp_path / str(run), seed=0) as buffer:
            buffer.resume()
            for episode in range(episodes):
                for t in range(4):
                    buffer.extend(odd_rows(run, 10 * episode + t, 1, done=[t == 3]), version=episode)
            buffer.save(1, wait=True)
    made = merge([tmp_path / "1", tmp_path / "2"], tmp_path / "m")
    assert (made.units, made.rows) == (5, 20)
    table = json.loads((tmp_path / "m" / "ids.json").read_text())["episodes"]
    assert [row[0] for row in table] == [0, 1, 2, 3, 4]
    assert [(row[1], row[2]) for row in table] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
    split(tmp_path / "m", [tmp_path / "x", tmp_path / "y"], count=2)
    merge([tmp_path / "x", tmp_path / "y"], tmp_path / "again")
    first, again = load(tmp_path / "m"), load(tmp_path / "again")
    assert first == again


def test_the_first_part_are_the_oldest_whole_episodes(tmp_path: Path) -> None:
    before = play(tmp_path / "a", 1, 40, envs=3, capacity=70)
    split(tmp_path / "a", [tmp_path / "old", tmp_path / "new"], count=6)
    old, new = load(tmp_path / "old"), load(tmp_path / "new")
    episode = [int.from_bytes(each, "little") for each in before["#episode"]]
    oldest = set(sorted(set(episode))[:6])
    assert [row for row, number in zip(before["id"], episode, strict=True) if number in oldest] == old["id"]
    assert [row for row, number in zip(before["id"], episode, strict=True) if number not in oldest] == new["id"]


def test_a_part_for_each_version_lies_in_one_folder(tmp_path: Path) -> None:
    before = play(tmp_path / "a", 1, 30)
    made = split(tmp_path / "a", tmp_path / "parts", by="version")
    names = {Path(each.directory).name for each in made}
    assert names == {each.name for each in (tmp_path / "parts").iterdir()}
    for each in made:
        found = load(Path(each.directory))
        begun = {
            int.from_bytes(version, "little")
            for version, place in zip(found["#version"], found["#place"], strict=True)
            if not any(place)
        }
        assert begun == {int(Path(each.directory).name.removeprefix("version-"))}
    merge([each.directory for each in made], tmp_path / "back")
    assert load(tmp_path / "back") == before


def versions(directory: Path, count: int) -> dict[str, Any]:
    """Save a buffer with so many versions of weights, of each of which there are two episodes at the least."""
    with ReplayBuffer(8 * count, directory=directory, seed=1) as buffer:
        buffer.resume()
        for t in range(4 * count):
            buffer.extend(odd_rows(1, t, 2, done=[t % 2 == 1, t % 3 == 2]), envs=2, version=t // 4)
        buffer.save(1, wait=True)
        return everything(buffer)


@pytest.fixture
def few_files() -> Iterator[None]:
    """60 more than are open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_files")
def test_of_many_versions_few_files_are_open_at_once(tmp_path: Path) -> None:
    before = versions(tmp_path / "a", 40)
    told: list[tuple[int, int]] = []
    made = split(tmp_path / "a", tmp_path / "parts", by="version", told=lambda *done: told.append(done))
    assert [Path(each.directory).name for each in made] == [f"version-{version}" for version in range(40)]
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]
    (tmp_path / "by ten").mkdir()
    tens = [merge([each.directory for each in made[at::4]], tmp_path / "by ten" / str(at)) for at in range(4)]
    merge([each.directory for each in tens], tmp_path / "back")
    assert load(tmp_path / "back") == before


def test_of_many_versions_each_block_is_read_about_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 8 * 1500)
    monkeypatch.setattr(routing, "AT_ONCE", 3)
    before = versions(tmp_path / "a", 40)
    read: list[Block] = []
    payload = HeldSegments.payload

    def counted(held: HeldSegments, block: Block) -> memoryview:
        read.append(block)
        return payload(held, block)

    monkeypatch.setattr(HeldSegments, "payload", counted)
    made = split(tmp_path / "a", tmp_path / "parts", by="version")
    assert 30 < len(set(read)) < len(read) < 2 * len(set(read))  # not once for each three versions
    merge([each.directory for each in made], tmp_path / "back")
    assert load(tmp_path / "back") == before


def test_without_a_second_folder_the_rest_is_left_out(tmp_path: Path) -> None:
    play(tmp_path / "a", 1, 30)
    (made,) = split(tmp_path / "a", [tmp_path / "some"], where={"t": (">", 24)})
    found = load(tmp_path / "some")
    assert made.rows == len(found["keys"])
    assert {t for _, t in found["id"]} >= set(range(25, 30))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "some"]


def test_shards_of_ranks_are_merged_into_one_buffer(tmp_path: Path) -> None:
    def save(ranks: Any) -> dict[str, Any]:
        with ReplayBuffer(200, directory=tmp_path / "r", ranks=ranks, seed=1) as buffer:
            buffer.resume()
            for t in range(10 + ranks.rank):
                buffer.extend(odd_rows(ranks.rank, t, 2, done=[t % 4 == 3] * 2), envs=2)
            buffer.save(5, wait=True)
            return everything(buffer)

    saved = fine(on_ranks(3, save))
    wanted: dict[Any, Any] = {}
    for each in saved:
        wanted |= rows_by_id(each)
    made = merge(tmp_path / "r", tmp_path / "one")
    assert rows_by_id(load(tmp_path / "one")) == wanted
    assert [part.shard for part in made.made_of] == [0, 1, 2]
    split(tmp_path / "r", [tmp_path / "x", tmp_path / "y"], fraction=0.4)
    merge([tmp_path / "y", tmp_path / "x"], tmp_path / "again")
    assert load(tmp_path / "again") == load(tmp_path / "one")


def test_training_goes_on_with_what_was_merged(tmp_path: Path) -> None:
    """Rows are sampled, overwritten oldest first and saved; and that run is a run of its own for the next merge."""
    for run in (1, 2):
        play(tmp_path / str(run), run, 20)
    merge([tmp_path / "1", tmp_path / "2"], tmp_path / "m")
    with ReplayBuffer(90, directory=tmp_path / "m", seed=3) as buffer:
        assert buffer.resume().step == 3
        for t in range(20, 40):
            buffer.extend(odd_rows(9, t, 2, done=[t % 5 == 4] * 2), envs=2)
            batch = buffer.sample(16, slices={"length": 3, "pad": True})
            assert np.all((np.diff(batch["t"].numpy(), axis=1) == 1) | ~batch.mask.numpy()[:, 1:])
        buffer.save(30, wait=True)
        held = everything(buffer)
    assert manifest_of(tmp_path / "m").made_of == []
    made = merge([tmp_path / "m"], tmp_path / "n")
    assert [part.directory for part in made.made_of] == [str(tmp_path / "m")]
    assert rows_by_id(load(tmp_path / "n")) == rows_by_id(held)


def test_what_is_left_out_is_said_and_named_by_resume(tmp_path: Path) -> None:
    play(tmp_path / "a", 1, 10)
    made = merge([tmp_path / "a"], tmp_path / "m")
    assert list(made.left_out) == ["trainer/counter.safetensors"]
    assert manifest_of(tmp_path / "m").left_out == made.left_out
    with ReplayBuffer(50, directory=tmp_path / "m", seed=1) as buffer:
        buffer.attach(counter=object_with_state())
        with pytest.raises(UsageError, match="counter is state of the trainer, which is neither merged nor split"):
            buffer.resume()


def object_with_state() -> Any:
    from tests.support.replaying import Counter

    return Counter()


def test_priorities_of_one_kind_alone_are_carried(tmp_path: Path) -> None:
    play(tmp_path / "a", 1, 10, select=PRIORITIZED)
    play(tmp_path / "b", 2, 10)
    made = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m")
    assert "sampled in different ways: prioritized, uniform" in made.left_out["selection"]
    assert len(load(tmp_path / "m", select=PRIORITIZED)["keys"]) == 40


def test_rows_that_do_not_say_how_they_are_sampled(tmp_path: Path) -> None:
    play(tmp_path / "a", 1, 10)
    export(tmp_path / "a", tmp_path / "out", to="jsonl")
    import_data(tmp_path / "out", tmp_path / "b")
    made = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m")
    assert "selection" not in made.left_out
    assert len(load(tmp_path / "m")["keys"]) == 40


def test_different_alphas_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play(tmp_path / "a", 1, 10, select=PRIORITIZED)
    play(tmp_path / "b", 2, 10, select=Prioritized(alpha=0.25, beta=0.4))
    assert main(["merge", *(str(tmp_path / name) for name in "ab"), "--out", str(tmp_path / "m")]) == 2
    assert "different alphas" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_a_dry_run_says_the_same_and_writes_nothing(tmp_path: Path) -> None:
    play(tmp_path / "a", 1, 20)
    said = merge([tmp_path / "a"], tmp_path / "m", dry_run=True)
    parts = split(tmp_path / "a", [tmp_path / "x", tmp_path / "y"], count=3, dry_run=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    made = merge([tmp_path / "a"], tmp_path / "m")
    assert (said.units, said.rows, said.run_id) == (made.units, made.rows, "")
    assert 0.8 < said.bytes / made.bytes < 1.25
    done = split(tmp_path / "a", [tmp_path / "x", tmp_path / "y"], count=3)
    assert [(each.units, each.rows) for each in parts] == [(each.units, each.rows) for each in done]


def test_empty_buffers_are_no_trouble(tmp_path: Path) -> None:
    with ReplayBuffer(10, directory=tmp_path / "none", seed=1) as buffer:
        buffer.resume()
        buffer.save(0, wait=True)
    before = play(tmp_path / "a", 1, 10)
    assert merge([tmp_path / "none"], tmp_path / "still none").rows == 0
    assert load(tmp_path / "still none")["keys"] == []
    merge([tmp_path / "none", tmp_path / "a"], tmp_path / "m")
    assert load(tmp_path / "m")["id"] == before["id"]


class TestRefused:
    """With a message that says what to do, and before anything is written."""

    @pytest.fixture
    def two(self, tmp_path: Path) -> Path:
        play(tmp_path / "a", 1, 10)
        play(tmp_path / "b", 2, 10)
        return tmp_path

    def refused(
        self, where: Path, match: str, runs: list[str], out: str = "m", kind: type[Exception] = ConfigError
    ) -> None:
        before = sorted(path.name for path in where.iterdir())
        with pytest.raises(kind, match=match):
            merge([where / run for run in runs], where / out)
        assert sorted(path.name for path in where.iterdir()) == before

    def test_no_runs_and_twice_the_same(self, two: Path) -> None:
        with pytest.raises(ConfigError, match="at least one is needed"):
            merge([], two / "m")
        self.refused(two, "is named twice", ["a", "b", "a"])
        self.refused(two, "there is no run of forebay", ["a", "c"], kind=NotARun)

    def test_rows_that_two_runs_have_in_common(self, two: Path) -> None:
        split(two / "a", [two / "x", two / "y"], count=2)
        self.refused(two, "are copies or parts of one run", ["a", "x"])
        merge([two / "a", two / "b"], two / "ab")
        self.refused(two, r"row 0 of run \w+ \(.*/b\)", ["ab", "b"])

    def test_other_columns(self, two: Path) -> None:
        with ReplayBuffer(50, directory=two / "c") as buffer:
            buffer.resume()
            buffer.extend({"run": np.zeros(3, np.int32), "other": np.zeros(3)})
            buffer.save(1, wait=True)
        self.refused(two, r"schema: column (other: float64|run: int32)\[\] is in .*/c, and not in .*/a", ["a", "c"])

    def test_a_place_that_is_taken_or_lies_in_a_run(self, two: Path) -> None:
        self.refused(two, "must be absent or an empty folder; it holds generations", ["a"], "b")
        self.refused(two, "must not lie in", ["a"], "a/m")
        (two / "full.part").mkdir()
        (two / "full.part" / "mine").write_text("kept")
        self.refused(two, "holds what no tool of forebay left there", ["a"], "full")
        assert (two / "full.part" / "mine").read_text() == "kept"

    def test_a_split_that_says_nothing_or_too_much(self, two: Path) -> None:
        for how, match in (
            ({}, "one of count, fraction, by and where"),
            ({"count": 1, "fraction": 0.5}, "not count, fraction"),
            ({"count": 99}, "there are"),
            ({"count": -1}, "at least 0"),
            ({"fraction": 1.5}, "from 0 to 1"),
            ({"by": "colour"}, "'task', 'version' are allowed"),
            ({"where": "reward"}, "COLUMN OP NUMBER"),
            ({"where": "reward > many"}, "a number is needed"),
            ({"where": "__import__('os').system('x') > 1"}, "there is none"),
            ({"where": "image > 1"}, "one real number in each row"),
        ):
            with pytest.raises(ConfigError, match=match):
                split(two / "a", [two / "x", two / "y"], **how)
        with pytest.raises(ConfigError, match="is named twice"):
            split(two / "a", [two / "x", two / "x"], count=1)
        with pytest.raises(ConfigError, match="transitions are of no task"):
            split(two / "a", two / "x", by="task")
        assert sorted(path.name for path in two.iterdir()) == ["a", "b"]

    def test_damage_is_found_and_nothing_stays(self, two: Path) -> None:
        path = next((two / "b" / "segments").iterdir())
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
        with pytest.raises(Damaged, match=str(path)):
            merge([two / "a", two / "b"], two / "m")
        path.unlink()
        with pytest.raises(Damaged, match="missing"):
            merge([two / "a", two / "b"], two / "m")
        assert sorted(each.name for each in two.iterdir()) == ["a", "b"]


def test_conditions_that_are_text() -> None:
    from pipeline.tools.choosing import parsed

    assert parsed("reward > 0.5 and task == 3") == {"reward": [(">", 0.5)], "task": [("==", 3)]}
    assert parsed("t>=1, t<9") == {"t": [(">=", 1), ("<", 9)]}
    assert parsed("task in [1, 2] and flag == true") == {"task": [("in", [1, 2])], "flag": [("==", True)]}
    assert parsed("task not in (3,4)") == {"task": [("not in", [3, 4])]}


def test_numbers_in_names_count_as_numbers() -> None:
    from pipeline.tools.sources import natural

    names = ["a/rank_10", "a/rank_2", "a/rank", "b/1", "a/rank_2/x"]
    for order in itertools.permutations(names):
        assert sorted(order, key=natural) == ["a/rank", "a/rank_2", "a/rank_2/x", "a/rank_10", "b/1"]
