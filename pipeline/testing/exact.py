"""Cuts a run at every event, resumes each, and compares with the run that was not cut."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import anyio

from pipeline.buffer import Group
from pipeline.pipeline import Pipeline
from pipeline.records import Claimed, Inherited
from pipeline.store.journal import read_journals
from pipeline.store.layout import Layout
from pipeline.testing.fakes import FakeTrainer, ItemKey, item_key
from pipeline.testing.recording import Change, RecordingFiles, Replay, folder_in_memory


class MakePipeline(Protocol):
    """Builds a fresh pipeline; hands ``how`` on to it: directory, file layer, and how it writes."""

    def __call__(self, **how: Any) -> Pipeline: ...


class Report(NamedTuple):
    """What :func:`assert_exact_resume` did."""

    changes: int
    """Calls that changed the folder in the run that was not cut: every event, and every step of a commit."""
    cuts: int
    """At how many of them the run was cut and resumed."""
    exact: bool
    """Whether whole batches had to be equal, or the trained items alone."""


class Script(NamedTuple):
    """How the trainer behaves."""

    groups: int
    until: int | None
    save_every: int
    train_seconds: float
    key: Callable[[Group], Any]


async def assert_exact_resume(
    make_pipeline: MakePipeline,
    *,
    groups: int,
    until: int | None = None,
    save_every: int = 2,
    train_seconds: float = 0.5,
    most: int = 300,
    seed: int = 0,
    key: Callable[[Group], Any] = item_key,
) -> Report:
    """Assert that a run which is killed at any event goes on as if it had not been.

    The run is made once from beginning to end, and then again from what ``kill -9`` would have left after each change
    of its folder: each event is written on its own, so every event is one; some cuts fall in the midst of a write. Up
    to ``most`` cuts are made at every one of them, beyond that at a sample. With ``strategy="synchronous"`` and with
    ``order="strict"`` the batches before and after a cut must be those of the unbroken run, one by one and in order;
    otherwise restarted attempts end at other times, and what must be equal is the multiset of trained items, with every
    bound kept; items that one of the runs dropped, and counted, are left out. A checkpoint whose ``committed()`` had
    returned before the cut must be there after it.

    ::

        @pytest.mark.virtual_time
        async def test_my_task_survives():
            await assert_exact_resume(lambda **how: Pipeline(my_task(), order="strict", **how), groups=4)

    Args:
        make_pipeline: builds a fresh pipeline, with fresh tasks, and hands on what it is given.
        groups: groups of a batch.
        until: the last step; None: as far as the sources reach.
        save_every: every how many steps the trainer saves.
        train_seconds: how long a step takes, in virtual seconds.
        most: cuts at the most.
        seed: chooses the sample when there are more.
        key: what is compared of a group.

    Raises:
        AssertionError: a resumed run differs; says where it was cut and in what it differs.
    """
    return await _cut_and_compare(make_pipeline, Script(groups, until, save_every, train_seconds, key), most, seed)


class _Whole(NamedTuple):
    """The run that was not cut."""

    trainer: FakeTrainer
    exact: bool
    dropped: set[ItemKey]
    committed: list[tuple[int, int]]
    """After how many changes of the folder it was known that a checkpoint of which step is there."""

    def promised(self, cut: int) -> int:
        """Return the step that a run must resume from at least, if it was cut after so many changes."""
        return max((step for changes, step in self.committed if changes <= cut), default=0)


async def _cut_and_compare(make_pipeline: MakePipeline, script: Script, most: int, seed: int) -> Report:
    with folder_in_memory() as folder:
        directory = os.path.join(folder, "whole")
        files = RecordingFiles(directory)
        pipe = make_pipeline(directory=directory, files=files, inline="eager", watchdog=None)
        committed: list[tuple[int, int]] = []
        trainer = await _run(pipe, script, on_saved=lambda step: committed.append((len(files.changes), step)))
        exact = pipe.options.strategy == "synchronous" or pipe.options.order == "strict"
        whole = _Whole(trainer, exact, _dropped(pipe, directory), committed)
        changes = list(files.changes)
        cuts = _choose(len(changes), most, seed)
        replay = Replay(os.path.join(folder, "replay"))
        for cut in cuts:
            replay.forward(changes, cut)
            left = replay.copy(os.path.join(folder, f"cut-{cut}"))
            torn = _torn(changes, cut, random.Random(f"{seed}/{cut}"))
            if torn:
                Replay(left).tear(changes[cut], torn)
            await _check_cut(make_pipeline, left, script, whole, _Cut(cut, changes, seed, torn))
            shutil.rmtree(left)
    return Report(len(changes), len(cuts), exact)


class _Cut(NamedTuple):
    after: int
    changes: list[Change]
    seed: int
    torn: float = 0.0
    """How much of the next change, a write, was done."""

    def __str__(self) -> str:
        last = str(self.changes[self.after - 1]) if self.after else "nothing"
        if self.torn:
            last += f", and {self.torn:.0%} of {self.changes[self.after]}"
        return f"cut after change {self.after} of {len(self.changes)} ({last}; seed={self.seed})"


def _torn(changes: list[Change], cut: int, chance: random.Random) -> float:
    """How much of the write that comes next is done, for about half of the cuts before one."""
    comes_write = cut < len(changes) and changes[cut].verb == "write"
    return chance.random() if comes_write and chance.random() < 0.5 else 0.0


def _choose(count: int, most: int, seed: int) -> list[int]:
    if count + 1 <= most:
        return list(range(count + 1))
    return sorted(random.Random(seed).sample(range(count + 1), most))


async def _run(
    pipe: Pipeline, script: Script, *, promised: int = 0, on_saved: Callable[[int], None] | None = None
) -> FakeTrainer:
    """Train to the end as a script would: resume, publish the weights, start, and save now and then."""
    trainer = FakeTrainer(lambda group: (item_key(group), script.key(group)))
    async with pipe:
        pipe.attach(trainer=trainer)
        resumed = await pipe.resume()
        assert resumed.step == len(trainer.batches), f"resumed at step {resumed.step} with other weights"
        assert resumed.step >= promised, f"resumed at step {resumed.step}; the checkpoint of {promised} was committed"
        async with pipe.weight_update(version=resumed.version):
            pass
        await pipe.start()
        async for batch in pipe.batches(groups=script.groups, until=script.until):
            trainer.step(batch)
            async with pipe.weight_update(version=batch.step):
                pass
            await anyio.sleep(script.train_seconds)
            if batch.step % script.save_every == 0:
                await (await pipe.save(batch.step)).committed()
                if on_saved is not None:
                    on_saved(batch.step)
        pipe.ledger.check()
    bound = pipe.options.max_staleness
    assert bound is None or trainer.stalest <= bound, f"a batch was {trainer.stalest} steps stale, of {bound} allowed"
    return trainer


async def _check_cut(make_pipeline: MakePipeline, folder: str, script: Script, whole: _Whole, cut: _Cut) -> None:
    pipe = make_pipeline(directory=folder, files=RecordingFiles(folder), inline=True, watchdog=None)
    try:
        found = await _run(pipe, script, promised=whole.promised(cut.after))
    except Exception as error:
        raise AssertionError(f"{cut}: the resumed run raised {error!r}") from error
    expected = whole.trainer
    if whole.exact:
        for step, (want, got) in enumerate(zip(expected.batches, found.batches, strict=False), 1):
            assert want == got, f"{cut}: the batch of step {step} is {got}; in the unbroken run it is {want}"
        count, wanted = len(found.batches), len(expected.batches)
        assert count == wanted, f"{cut}: {count} steps were trained, and {wanted} in the unbroken run"
    elif script.until is None:
        extra = _difference(found, expected, but=whole.dropped)
        assert not extra, f"{cut}: trained beyond the unbroken run: {extra}"
        missing = _difference(expected, found, but=_dropped(pipe, folder))
        assert not missing, f"{cut}: never trained, and not dropped: {missing}"
    else:
        twice = [item for item, count in Counter(item for item, _ in found.groups).items() if count > 1]
        assert not twice, f"{cut}: trained twice: {twice}"


def _difference(some: FakeTrainer, others: FakeTrainer, *, but: set[ItemKey]) -> list[str]:
    """What ``some`` has trained more often than ``others``, leaving items out that may be."""
    left = Counter(map(repr, some.groups)) - Counter(map(repr, others.groups))
    for item, key in some.groups:
        if item in but:
            left.pop(repr((item, key)), None)
    return sorted(left.elements())


def _dropped(pipe: Pipeline, directory: str) -> set[ItemKey]:
    """Which items a run has dropped: its ledger knows their uids, and the journals what these were claimed for."""
    layout = Layout(directory)
    run = layout.read_run()
    assert run is not None
    items: dict[int, ItemKey] = {}
    for logged in read_journals(layout, run_tag=run.tag):
        match logged.event:
            case Claimed() as claimed:
                items[claimed.uid] = (claimed.task, claimed.epoch, claimed.index)
            case Inherited() as inherited:
                items.update((each.uid, (each.task, each.epoch, each.index)) for each in inherited.items)
    return {item for uid, item in items.items() if pipe.ledger.state(uid) == "dropped"}
