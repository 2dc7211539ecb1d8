"""What is said of folders in every condition, and that it agrees with what a resume finds."""

from __future__ import annotations

import os
import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from pipeline import (
    ConfigError,
    Context,
    EndOfSource,
    ForebayError,
    Pipeline,
    ReplayBuffer,
    Rollout,
    RolloutFailed,
    Stopped,
    Task,
)
from pipeline.checkpoint import Status, salvage, status_of
from pipeline.checkpoint.lives import LifeReader
from pipeline.checkpoint.verify import verify_quickly
from pipeline.cli import main
from pipeline.cli.status import CODES
from pipeline.records import Closed
from pipeline.store.journal import Logged
from pipeline.store.layout import JournalName
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline, lasting, train, uneven
from tests.support.disk import ScriptedFiles, tree
from tests.support.experience import fed, filled
from tests.support.runs import task

GOLDEN = Path(__file__).parents[1] / "golden"
virtual = pytest.mark.virtual_time


def states(directory: str | os.PathLike[str], **more: Any) -> tuple[str, str]:
    before = tree(directory) if os.path.isdir(directory) else {}
    found = status_of(directory, **more)
    assert (tree(directory) if os.path.isdir(directory) else {}) == before
    return found.state, found.why


def tasks(seed: int) -> list[Any]:
    return [
        task(14, uneven(seed), name="a", group_size=2, epochs=2),
        task(9, uneven(seed + 1), name="b", share=2.0, shuffle=True),
    ]


@virtual
@pytest.mark.parametrize("seed", range(4))
async def test_at_any_moment_it_says_what_a_resume_finds(tmp_path: Path, seed: int) -> None:
    """Lives that are copied at random moments, as a kill leaves them, or are closed; the next goes on with them."""
    rng = random.Random(seed)
    folder, ends, trained = str(tmp_path / "0"), set[str](), Trained()
    for life in range(1, 60):
        before = status_of(folder)
        options = {"directory": folder, "concurrency": 5, "capacity": 9, "max_deaths": 10**6}
        async with inline_pipeline(tasks(seed * 100 + life), **options) as pipe:
            trained = Trained()
            resumed = await begin(pipe, trained=trained)
            if life > 1:
                assert (before.newest is not None) == (resumed.generation is not None)
                assert before.work is not None
                assert (before.work.buffered, before.work.waiting) == (resumed.buffered, resumed.waiting)
            copy = await some_steps(pipe, trained, rng, str(tmp_path / str(life)))
        found = status_of(copy or folder)
        assert found.life is not None
        ends.add(found.life.ended)
        assert found.life.ended == ("killed" if copy else "closed")
        assert not found.damages
        over = trained.items == sorted([*range(14)] * 2 + [*range(9)])
        assert found.newest is not None
        assert (found.state == "finished") == (over and found.newest.step == len(trained.batches)), found
        folder = copy or folder
        if found.state == "finished":
            break
    assert found.state == "finished"
    assert ends == {"killed", "closed"}


async def some_steps(pipe: Pipeline, trained: Trained, rng: random.Random, target: str) -> str:
    """Train and save a little. Return the copy to go on with; empty: the run's own folder."""
    for _ in range(rng.randrange(5)):
        with anyio.move_on_after(rng.uniform(0, 6)), suppress(EndOfSource):
            batch = await pipe.get_batch(2)
            await train(pipe, trained, batch)
            if rng.random() < 0.6:
                await (await pipe.save(batch.step)).committed()
            else:
                await pipe.ack(batch.step)
    await anyio.sleep(rng.uniform(0, 2))
    return "" if rng.random() < 0.3 else crashed_copy(str(pipe.options.directory), target)


@pytest.fixture
async def run(run_directory: str) -> str:
    """A run of two lives: the first was killed, the second saved its third step and was killed too."""
    first = run_directory + "1"
    for folder, copy, steps in ((first, first + "copy", (1, 2)), (first + "copy", run_directory, (3,))):
        async with inline_pipeline(
            task(12, uneven(1)), directory=folder, concurrency=3, capacity=6, segment_bytes=900, keep=None
        ) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            for step in steps:
                await train(pipe, trained, await pipe.get_batch(2))
                await (await pipe.save(step)).committed()
            await anyio.sleep(3)
            crashed_copy(folder, copy)
    return run_directory


async def why_refused(directory: str) -> str:
    """Try to resume; return what that raised."""
    try:
        async with inline_pipeline(task(12, uneven(1)), directory=directory, concurrency=3, capacity=6) as pipe:
            pipe.attach(trained=Trained())
            await pipe.resume()
    except ForebayError as error:
        return str(error)
    return ""


@virtual
class TestDamage:
    async def test_broken_is_what_a_resume_refuses(self, run: str, tmp_path: Path) -> None:
        """Each file in turn is gone, or short. A payload that nobody looked at may be what is missing."""
        outcomes = set()
        for name in sorted(tree(run).keys() - {"run.json"}):
            for how in ("gone", "short"):
                copy = shutil.copytree(run, tmp_path / f"{how} {name.replace('/', ' ')}")
                if how == "gone":
                    (copy / name).unlink()
                else:
                    os.truncate(copy / name, (copy / name).stat().st_size // 2)
                found = status_of(copy)
                refused = await why_refused(str(copy))
                if found.state == "broken":
                    assert refused, (name, how, found)
                elif refused:  # what the journal's end names is checked by nobody before
                    assert name.startswith("segments/"), (name, how, refused)
                outcomes.add((found.state, bool(found.damages), name.split("/")[0]))
        assert {("broken", True, "segments"), ("broken", True, "journals"), ("broken", True, "generations")} <= outcomes
        assert ("to be continued", True, "generations") in outcomes, "of an older one"

    async def test_a_damaged_manifest(self, run: str) -> None:
        manifests = sorted(Path(run, "generations").glob("*/manifest.json"))
        whole = manifests[-1].read_bytes()
        manifests[-1].write_bytes(whole.replace(b'"step": 3', b'"step": 4'))
        state, why = states(run)
        assert state == "broken"
        assert "resume(step=2) takes the one before it" in why
        assert why == await why_refused(run)
        manifests[-1].write_bytes(whole)
        manifests[0].write_bytes(b"")
        found = status_of(run)
        assert (found.state, len(found.damages), found.generations) == ("to be continued", 1, len(manifests) - 1)

    async def test_a_file_of_the_newest_generation(self, run: str) -> None:
        newest = max(Path(run, "generations").iterdir())
        os.truncate(newest / "trainer" / "trained.safetensors", 10)
        state, why = states(run)
        assert state == "broken"
        assert "trained.safetensors: has 10 bytes" in why
        assert "resume(step=2)" in why

    async def test_generations_that_are_all_gone(self, run: str) -> None:
        shutil.rmtree(os.path.join(run, "generations"))
        state, why = states(run)
        assert state == "broken"
        assert why == await why_refused(run)

    async def test_a_consumer_half_that_is_none(self, run: str) -> None:
        newest = max(Path(run, "generations").iterdir())
        half = newest / "consumer.json"
        half.write_bytes(b"x" * half.stat().st_size)  # sizes do not show it
        found = status_of(run)
        assert (found.state, found.work) == ("broken", None)
        assert "consumer.json" in found.why

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            (b"{", "marker is damaged"),
            (b'{"kind": "forebay run", "format_version": 99, "run_id": "00"}', "Install a newer forebay"),
            (b'{"kind": "forebay run", "format_version": 1, "run_id": "%s"}' % (b"7" * 32), "belongs to run"),
        ],
    )
    async def test_a_marker_that_cannot_be_used(self, run: str, content: bytes, why: str) -> None:
        Path(run, "run.json").write_bytes(content)
        state, said = states(run)
        assert state == "broken"
        assert why in said

    async def test_a_marker_that_is_gone(self, run: str) -> None:
        os.unlink(os.path.join(run, "run.json"))
        state, why = states(run)
        assert state == "broken"
        assert why == await why_refused(run)

    async def test_a_generation_without_its_buffer_needs_no_journal(self, run_directory: str) -> None:
        async with inline_pipeline(task(12), directory=run_directory, concurrency=3) as pipe:
            await begin(pipe, trained=Trained())
            batch = await pipe.get_batch(2)
            await anyio.sleep(1)
            await (await pipe.save(batch.step, replay_buffer=False)).committed()
        shutil.rmtree(os.path.join(run_directory, "journals"))
        found = status_of(run_directory)
        assert found.state == "to be continued"
        assert found.life is not None
        assert found.life.ended == "unknown"  # the lock alone names a life
        assert found.newest is not None
        assert found.newest.without == ["replay_buffer"]
        assert found.work is not None
        async with inline_pipeline(task(12), directory=run_directory) as pipe:
            pipe.attach(trained=Trained())
            resumed = await pipe.resume()
        assert (found.work.buffered, found.work.waiting) == (resumed.buffered, resumed.waiting) == (0, 4)

    async def test_what_a_buffer_does_not_read_does_not_break_it(self, run_directory: str) -> None:
        with ReplayBuffer(100, directory=run_directory) as buffer:
            buffer.extend({"n": np.arange(5)})
            buffer.save(1, wait=True)
        (journal,) = Path(run_directory, "journals").iterdir()
        journal.unlink()
        assert states(run_directory)[0] == "to be continued"
        with ReplayBuffer(100, directory=run_directory) as buffer:
            assert buffer.resume().rows == 5
        (segment,) = Path(run_directory, "segments").iterdir()
        os.truncate(segment, 64)
        assert states(run_directory)[0] == "broken"
        with ReplayBuffer(100, directory=run_directory) as buffer, pytest.raises(ForebayError):
            buffer.resume()


class TestNothing:
    def test_an_absent_or_empty_folder_and_what_a_start_leaves_that_was_killed_at_once(self, tmp_path: Path) -> None:
        assert states(tmp_path / "absent") == ("nothing", f"{tmp_path / 'absent'}: there is nothing")
        assert states(tmp_path)[0] == "nothing"
        for name in ("lock", "run.json.part", "stop"):
            (tmp_path / name).touch()
            assert states(tmp_path) == ("nothing", f"{tmp_path}: an empty folder")

    def test_a_folder_of_something_else_and_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("mine")
        state, why = states(tmp_path)
        assert state == "nothing"
        assert "thesis.tex" in why
        state, why = states(tmp_path / "thesis.tex")
        assert state == "nothing"
        assert "is a file" in why
        (tmp_path / "run.json").write_text('{"kind": "a run of others", "run_id": "00"}')
        assert states(tmp_path)[0] == "nothing"

    @pytest.mark.parametrize("until", [-1, True, 1.5, "7"])
    def test_a_step_that_is_none(self, tmp_path: Path, until: Any) -> None:
        with pytest.raises(ConfigError, match="until"):
            status_of(tmp_path, until=until)


@virtual
class TestLives:
    async def test_killed_after_it_was_asked_to_stop(self, run_directory: str, tmp_path: Path) -> None:
        async with inline_pipeline(task(12), directory=run_directory) as pipe:
            await begin(pipe)
            batch = await pipe.get_batch(2)
            pipe.request_save("the queue's end", then="stop", within=1000)
            await anyio.sleep(1)
            running = status_of(run_directory).life
            killed = status_of(crashed_copy(run_directory, tmp_path / "copy")).life
            batch.release()
        assert running is not None
        assert (running.ended, running.asked, running.reason) == ("running", "the queue's end", "")
        assert killed is not None
        assert (killed.ended, killed.asked, killed.reason, killed.over) == ("killed", "the queue's end", "", "")

    async def test_stopped_although_the_script_went_on(self, run_directory: str) -> None:
        async with inline_pipeline(task(12), directory=run_directory) as pipe:
            await begin(pipe)
            await pipe.get_batch(2)
            pipe.request_save("me", then="stop")
            with pytest.raises(Stopped):
                await pipe.ack(1)
        life = status_of(run_directory).life
        assert life is not None
        assert (life.ended, life.reason) == ("stopped", "me")

    async def test_a_runner_that_ended_the_run(self, run_directory: str) -> None:
        async def fails(item: Any, ctx: Any) -> Rollout:
            raise ValueError("x" * 2000)

        with suppress(RolloutFailed):
            async with inline_pipeline(task(12, fails, on_failure="fail_fast"), directory=run_directory) as pipe:
                await begin(pipe)
                await pipe.get_batch(2)
        life = status_of(run_directory).life
        assert life is not None
        assert life.ended == "failed"
        assert life.reason.startswith("RolloutFailed: ")
        assert len(life.reason) == 500

    @pytest.mark.parametrize(("given", "ended"), [(None, "closed"), (0, "closed"), (3, "failed"), ("bad", "failed")])
    async def test_a_script_that_left_by_exit(self, run_directory: str, given: Any, ended: str) -> None:
        with suppress(SystemExit):
            async with inline_pipeline(task(12), directory=run_directory) as pipe:
                await begin(pipe)
                raise SystemExit(given)
        life = status_of(run_directory).life
        assert life is not None
        assert life.ended == ended

    async def test_a_life_that_took_the_folder_and_wrote_nothing(self, run_directory: str) -> None:
        async with inline_pipeline(task(12), directory=run_directory) as pipe:
            await begin(pipe)
        async with inline_pipeline(task(12), directory=run_directory):
            running = status_of(run_directory).life
        assert running is not None
        assert (running.incarnation, running.ended) == (2, "running")
        after = status_of(run_directory).life
        assert after is not None
        assert (after.incarnation, after.ended) == (2, "unknown")

    async def test_a_life_may_have_journals_of_several_numbers(self) -> None:
        """A write that failed is followed by another journal, on one rank perhaps; the rank that was killed counts."""
        names = [JournalName(number, rank, "") for number, rank in ((1, 0), (2, 0), (3, 0), (2, 1), (4, 1))]
        for holder, ended in ((2, "unclosed"), (4, "closed"), (0, "closed")):
            lives = LifeReader(names, holder)
            for name in names:
                if name[:2] in ((1, 0), (2, 0), (4, 1)):
                    lives.take(Logged(name.incarnation, name.rank, 1, Closed(1.0, "closed")))
            life = lives.result(held=False, rollouts=False, written=True)
            assert life is not None
            assert (life.incarnation, life.ended) == (4, ended), holder

    async def test_of_a_version_that_did_not_say_how_it_ended(self) -> None:
        ends = {}
        for name in ("v1", "v1c", "replay_v1b/run", "trajectories_v1/run"):
            life = status_of(GOLDEN / name).life
            assert life is not None
            ends[name] = life.ended
        buffers = dict.fromkeys(("replay_v1b/run", "trajectories_v1/run"), "unclosed")
        assert ends == {"v1": "closed", "v1c": "killed", **buffers}

    async def test_a_salvaged_run_was_closed_by_that(self, run: str, tmp_path: Path) -> None:
        salvage(run, str(tmp_path / "new"))
        found = status_of(tmp_path / "new")
        assert found.life is not None
        assert (found.state, found.life.ended, found.life.reason) == ("to be continued", "closed", "salvage")


@virtual
class TestWhetherItIsFinished:
    async def test_a_stream_s_end_stands_nowhere(self, run_directory: str) -> None:
        async def stream() -> Any:
            for number in range(4):
                yield {"n": number}

        streamed = Task("s", source=stream(), run=uneven(1))
        async with inline_pipeline(streamed, directory=run_directory) as pipe:
            await finish(pipe, await begun(pipe), 2)
            await (await pipe.save(2)).committed()
        state, why = states(run_directory)
        assert state == "to be continued"
        assert "whether its stream has ended" in why
        assert states(run_directory, until=2)[0] == "finished"

    async def test_a_source_without_end_is_never_finished(self, run_directory: str) -> None:
        async with inline_pipeline(task(4, epochs=None), directory=run_directory, capacity=2) as pipe:
            trained = await begun(pipe)
            async for batch in pipe.batches(groups=2, until=2):
                await train(pipe, trained, batch)
            await (await pipe.save(2)).committed()
        assert states(run_directory)[0] == "to be continued"

    async def test_between_two_epochs_nothing_waits_and_more_is_to_be_drawn(self, run_directory: str) -> None:
        async with inline_pipeline(task(4, epochs=2), directory=run_directory, capacity=2) as pipe:
            trained = await begun(pipe)
            async for batch in pipe.batches(groups=2, until=2):
                await train(pipe, trained, batch)
                pipe._run.producer.paused = batch.step == 2  # the second epoch is not begun
            await (await pipe.save(2)).committed()
        found = status_of(run_directory)
        assert found.work is not None
        drawn = found.work.tasks["numbers"]
        assert (found.work.left, drawn.epoch, drawn.drawn, drawn.length, drawn.epochs) == (0, 0, 4, 4, 2)
        assert (found.state, drawn.ended) == ("to be continued", False)
        assert "there is more to draw" in found.why

    async def test_a_group_that_waits_for_its_reward(self, run_directory: str) -> None:
        async def parks(item: Any, ctx: Context) -> Rollout:
            if item["n"] == 1:
                ctx.park()
            return Rollout(reward=0.0)

        async with inline_pipeline(task(2, parks), directory=run_directory) as pipe:
            await begin(pipe)
            batch = await pipe.get_batch(1)
            await anyio.sleep(1)
            await (await pipe.save(batch.step)).committed()
        found = status_of(run_directory)
        assert found.work is not None
        assert (found.state, found.work.parked, found.work.left) == ("to be continued", 1, 1)

    async def test_what_the_next_task_list_leaves_out_does_not_hold_it_up(self, run_directory: str) -> None:
        both = [task(2, name="a"), task(40, lasting({}, 1000), name="gone")]
        async with inline_pipeline(both, directory=run_directory, capacity=6) as pipe:
            await begin(pipe)
            await anyio.sleep(1)
        async with inline_pipeline(task(2, name="a"), directory=run_directory) as pipe:
            await begin(pipe)
            await (await pipe.save((await pipe.get_batch(2)).step)).committed()
        found = status_of(run_directory)
        assert found.work is not None
        assert (found.state, found.work.left, list(found.work.tasks)) == ("finished", 0, ["a"])
        assert found.work.waiting > 0

    async def test_rollouts_that_fill_a_buffer(self, run_directory: str) -> None:
        buffer = ReplayBuffer(100)
        async with fed(buffer, 3, directory=run_directory, inline=True, files=ScriptedFiles()) as pipe:
            await begin(pipe)
            await filled(pipe)
            await (await pipe.save(1)).committed()
        found = status_of(run_directory)
        assert found.newest is not None
        assert (found.state, found.newest.rows) == ("to be continued", len(buffer))
        assert "only its script knows" in found.why

    async def test_a_trainer_s_own_checkpoint_that_is_gone_is_told(self, run_directory: str, tmp_path: Path) -> None:
        (tmp_path / "own").touch()
        async with inline_pipeline(task(12), directory=run_directory) as pipe:
            await begin(pipe)
            await (await pipe.save((await pipe.get_batch(2)).step, external=tmp_path / "own")).committed()
        assert not status_of(run_directory).notes
        (tmp_path / "own").unlink()
        assert str(tmp_path / "own") in status_of(run_directory).notes[0]

    async def test_a_line_that_sets_aside_what_came_after_its_generation(self, run_directory: str) -> None:
        async with inline_pipeline(task(12), directory=run_directory, after_crash="discard") as pipe:
            await begin(pipe)
            await anyio.sleep(1)
        found = status_of(run_directory)
        assert found.work is not None
        assert (found.work.buffered, found.work.waiting) == (0, 0)


def test_what_is_removed_while_it_is_looked_at_is_no_damage(run_directory: str, monkeypatch: Any) -> None:
    """At each look another generation is half gone, as one is that is being removed; one is damaged for good."""
    with ReplayBuffer(100, directory=run_directory, keep=None) as buffer:
        for step in range(1, 5):
            buffer.extend({"n": np.arange(5)})
            buffer.save(step, wait=True)
        folders = sorted(Path(run_directory, "generations").iterdir())
        os.unlink(folders[2] / "replay.json")
        going = iter(folders)

        def quick(layout: Any, run: Any, seen: Any) -> Any:
            folder = next(going)
            os.unlink(folder / "replay.json")
            verified = verify_quickly(layout, run, seen)
            assert len(verified.damages) == 2
            shutil.rmtree(folder)
            return verified

        monkeypatch.setattr("pipeline.checkpoint.status.verify_quickly", quick)
        found = status_of(run_directory)
    assert (found.state, [each.path for each in found.damages]) == (
        "running",
        [f"generations/{folders[2].name}/replay.json"],
    )


async def begun(pipe: Pipeline) -> Trained:
    trained = Trained()
    await begin(pipe, trained=trained)
    return trained


def as_json(capsys: Any, *arguments: str) -> tuple[int, Status]:
    code = main(["status", *arguments, "--json"])
    return code, msgspec.json.decode(capsys.readouterr().out, type=Status)


class TestCommand:
    def test_json_is_the_status(self, capsys: Any, tmp_path: Path) -> None:
        for name in ("v1", "v1d", "v1e", "replay_v1b/run", "trajectories_v1/run", "trajectory_shards_v1/run"):
            assert as_json(capsys, str(GOLDEN / name)) == (3, status_of(GOLDEN / name))
        assert as_json(capsys, str(GOLDEN / "v1"), "--until", "3") == (0, status_of(GOLDEN / "v1", until=3))
        assert as_json(capsys, str(tmp_path)) == (5, status_of(tmp_path))

    def test_what_a_person_reads(self, capsys: Any) -> None:
        assert main(["status", str(GOLDEN / "v1c")]) == 3
        shown = capsys.readouterr().out.splitlines()
        assert shown[0] == f"{GOLDEN / 'v1c'}: to be continued"
        rest = {line[2:12].strip(): line[12:] for line in shown[2:]}
        assert rest["newest"] == "generation 3, step 4, 2024-01-01T00:00:00+00:00 (save)"
        assert rest["last life"] == "incarnation 2 was killed; 1 attempt in flight"
        assert rest["waits"] == "3 to be trained, 1 to be run, 0 for a reward"
        assert rest["task"] == "words: epoch 1 of 1, 12 of 12 items drawn"
        assert rest["held by"] == "nobody"

    @pytest.mark.parametrize(
        ("field", "printed"),
        [
            ("state", "to be continued"),
            ("newest.step", "3"),
            ("newest.rows", ""),
            ("hold.alive", ""),
            ("hold.held", "false"),
            ("work.tasks.chat.length", "3"),
            ("damages", "[]"),
        ],
    )
    def test_one_field(self, capsys: Any, field: str, printed: str) -> None:
        assert main(["status", str(GOLDEN / "v1"), "--field", field]) == 3
        assert capsys.readouterr().out == printed + "\n"

    def test_a_field_of_what_is_not_there_is_empty(self, capsys: Any, tmp_path: Path) -> None:
        assert main(["status", str(tmp_path), "--field", "newest.step"]) == 5
        assert capsys.readouterr().out == "\n"

    @pytest.mark.parametrize(
        "wrong",
        [
            [],
            ["a", "b"],
            ["a", "--until", "x"],
            ["a", "--until", "-1"],
            ["a", "--field", "newest_step"],
            ["a", "--field", "state.x"],
            ["a", "--json", "--field", "state"],
        ],
    )
    def test_a_wrong_command_line(self, capsys: Any, wrong: list[str]) -> None:
        with pytest.raises(SystemExit) as left:
            main(["status", *wrong])
        assert left.value.code == 2
        assert "usage: forebay status" in capsys.readouterr().err

    def test_the_help_names_every_code(self, capsys: Any) -> None:
        with pytest.raises(SystemExit) as left:
            main(["status", "--help"])
        assert left.value.code == 0
        shown = capsys.readouterr().out
        for state, number in CODES.items():
            assert f"\n  {number}  {state}" in shown
