"""Lives of a pipeline on a loop that is driven step by step, with the model told of everything that is seen.

Runners wait until they are told how they end. A step ends when nothing can happen any more without another one, so what
was recorded by then is what a crash at that moment would leave.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import anyio

from pipeline import Batch, Context, EndOfSource, Item, Pipeline, Resumed, Retry, Rollout, Starved, Task
from pipeline.checkpoint.generations import find_generations
from pipeline.store.layout import Layout
from pipeline.testing import FakeTrainer, Numbers, RecordingFiles, Replay, VirtualClockLoop
from pipeline.testing.recording import Change, folder_in_memory
from tests.support.pipeline_model import Generation, Key, Model, ModelItem

GROUPS = 2
ATTEMPTS = 2
TIMEOUT = 10.0
PLANS = {"a": (5, 1, 1), "b": (4, 2, 1)}
"""Of each task: how many items, the size of a group, and how many of it must finish."""
MEMBERS = ("pending", "in flight", "finished", "given up", "unrewarded")


def key_of(task: str, epoch: int, index: int, uid: int) -> Key:
    """What names an item in any run; what was submitted has no index of its own."""
    return (task, epoch, uid if index < 0 else index)


class Attempt:
    """A rollout that waits to be told how it ends."""

    def __init__(self, item: Item, ctx: Context) -> None:
        self.uid, self.member, self.version = item.uid, ctx.member, ctx.version
        self.key = key_of(item.task, item.epoch, item.index, item.uid)
        self.began = anyio.current_time()
        self.told = anyio.Event()
        self.how = ""


class PipelineLives:
    """A pipeline, its trainer, and the folder that one life leaves to the next."""

    model: Model
    pipe: Pipeline
    trainer: FakeTrainer
    files: RecordingFiles
    options: dict[str, Any]
    bound: int | None
    base: str
    """The folder as it was when this life began."""
    groups: int
    repeats: bool
    """Of the batch that is waited for: its groups, and whether it is one of before a crash."""
    flying: dict[tuple[int, int], Attempt]
    held: list[Batch]
    pushed: anyio.Event
    """Set when the push of weights that is open is to end."""
    marks: list[tuple[int, Model]]
    """After each step: how many changes the folder had seen, and the model."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualClockLoop()
        self.memory = folder_in_memory()
        self.directory = os.path.join(self.memory.name, "0")
        self.lives = 0
        self.seen: list[tuple[str, Any]] = []
        """What happened in this step, in order, as runners and the trainer see it."""
        self.answer: Exception | None = None
        self.asking: asyncio.Task[None] | None = None
        self.updating: asyncio.Task[None] | None = None
        self.paused = self.aborting = self.push_fails = self.may_be_older = False
        self.more_hints: list[Any] = []
        self.adopted, self.unsure = set[int](), set[int]()

    # -- steps of the loop -----------------------------------------------------------------------------------------

    def do(self, action: Coroutine[Any, Any, None] | None = None, seconds: float = 0.0) -> None:
        """Do something, let everything happen that follows, and tell the model."""

        async def until_quiet() -> None:
            if action is not None:
                await action
            await asyncio.sleep(seconds + 0.001)  # on this clock it ends when nothing else is ready to run

        self.loop.run_until_complete(until_quiet())
        for what, about in self.seen:
            getattr(self, f"saw_{what}")(about)
        self.seen.clear()
        for name in ("asking", "updating"):
            task = getattr(self, name)
            if task is not None and task.done():
                setattr(self, name, None)
                if not task.cancelled():
                    task.result()
        self.marks.append((len(self.files.changes), self.model.copy()))

    def saw_start(self, attempt: Attempt) -> None:
        assert not self.paused, "an attempt started during a push"
        if attempt.uid not in self.model.items:
            self.model.claimed(attempt.uid, attempt.key, *PLANS[attempt.key[0]][1:])
        assert self.model.items[attempt.uid].key == attempt.key
        self.model.started(attempt.uid, attempt.member, attempt.version)

    def saw_end(self, attempt: Attempt) -> None:
        if attempt.how == "fail":
            self.model.failed(attempt.uid, attempt.member)
        else:
            self.model.finished(attempt.uid, attempt.member, attempt.version, park=attempt.how == "park")

    def saw_cut(self, attempt: Attempt) -> None:
        if self.aborting:
            self.model.interrupted(attempt.uid, attempt.member)
        else:
            assert self.loop.time() >= attempt.began + TIMEOUT, "nobody had a reason to cut this attempt"
            self.model.failed(attempt.uid, attempt.member)

    def saw_batch(self, batch: Batch) -> None:
        model, before = self.model, self.model.selectable
        assert batch.repeated == self.repeats
        assert self.bound is None or batch.staleness <= self.bound
        model.taken(batch.step, batch.uids, repeated=batch.repeated)
        left = [uid for uid in before if uid not in batch.uids and not batch.repeated]
        if len(batch) < self.groups:
            self.check_drained()
        if self.options["order"] == "strict" and not batch.repeated:
            assert max(batch.uids) < min([*left, *model.uids("open", "parked")], default=99), "not in draw order"
        elif self.options["selector"] == "stalest":
            ages = [model.items[uid].effective for uid in batch.uids]
            assert all(model.items[uid].effective >= max(ages) for uid in left), "not the stalest"
        self.held.append(batch)

    def saw_nothing(self, answer: tuple[Exception, int]) -> None:
        error, flying = answer
        if isinstance(error, EndOfSource):
            self.check_drained()
        assert not flying, f"{error!r}, and {flying} attempts were in flight"
        self.answer = error

    def check_drained(self) -> None:
        """Nothing more can come: what was drawn has ended or is leased, and all was drawn."""
        model = self.model
        assert not [*model.uids("open", "parked"), *model.selectable]
        keys = [item.key for item in model.items.values() if item.key[1] >= 0]
        assert len(keys) == sum(count for count, _, _ in PLANS.values())

    def saw_pushing(self, version: int) -> None:
        self.paused = True

    def saw_updated(self, version: int) -> None:
        self.paused, self.model.version = False, version

    # -- the run -----------------------------------------------------------------------------------------------------

    async def run_item(self, item: Item, ctx: Context) -> Rollout:
        attempt = self.flying[item.uid, ctx.member] = Attempt(item, ctx)
        self.seen.append(("start", attempt))
        try:
            await attempt.told.wait()
        except BaseException:
            self.seen.append(("cut", attempt))
            raise
        finally:
            del self.flying[item.uid, ctx.member]
        self.seen.append(("end", attempt))
        if attempt.how == "fail":
            raise ValueError("told to fail")
        if attempt.how == "park":
            ctx.park()
        return Rollout({"n": [item["n"]]}, reward=float(ctx.member))

    async def wait_for_batch(self, groups: int) -> None:
        try:
            self.seen.append(("batch", await self.pipe.get_batch(groups)))
        except (EndOfSource, Starved) as error:
            self.seen.append(("nothing", (error, len(self.flying))))

    async def push(self, version: int, running: Any) -> None:
        with suppress(ConnectionError):
            async with self.pipe.weight_update(version=version, running=running):
                self.seen.append(("pushing", version))
                await self.pushed.wait()
                if self.push_fails:
                    raise ConnectionError
            self.seen.append(("updated", version))

    def make(self) -> Pipeline:
        tasks = [
            Task(
                name,
                source=Numbers(count),
                run=self.run_item,
                group_size=size,
                min_group=need,
                on_failure=Retry(ATTEMPTS),
                timeout=TIMEOUT,
            )
            for name, (count, size, need) in PLANS.items()
        ]
        how: dict[str, Any] = {"seed": 7, "watchdog": None, "max_deaths": 999, "batch_groups": GROUPS, "inline": True}
        how["segment_bytes"] = 600  # two or three rollouts each: some go with every step that is let go
        return Pipeline(tasks, directory=self.directory, files=self.files, **how, **self.options)

    def begin(self, step: int | None = None, fuzzy: dict[int, ModelItem] | None = None) -> None:
        """Begin a life in the folder as it is."""
        self.lives += 1
        self.base = os.path.join(self.memory.name, f"base-{self.lives}")
        if os.path.isdir(self.directory):
            shutil.copytree(self.directory, self.base)
        self.files = RecordingFiles(self.directory)
        self.pipe = self.make()
        self.trainer = FakeTrainer(lambda group: key_of(group.task, group.epoch, group.index, group.uid))
        self.flying: dict[tuple[int, int], Attempt] = {}
        self.held: list[Batch] = []
        self.asking = self.updating = None
        self.paused = self.aborting = False
        self.marks = [(0, self.model.copy())]
        self.do(self.open(step, fuzzy or {}))

    async def open(self, step: int | None, fuzzy: dict[int, ModelItem]) -> None:
        pipe = self.pipe
        await pipe.__aenter__()
        pipe.attach(trainer=self.trainer)
        self.model.incarnation = pipe.statistics().incarnation
        resumed = await pipe.resume(step=step)
        if resumed.generation is None:
            assert not self.model.generations
            self.model = self.fresh()
            self.model.incarnation = pipe.statistics().incarnation
        else:
            self.went_back(resumed, step, fuzzy)
            self.committed(Generation(self.model, whole=True, batches=self.trainer.batches))
        async with pipe.weight_update(version=resumed.version):
            pass
        await pipe.start()
        if resumed.generation is None:
            self.committed(Generation(self.model, whole=True, batches=[]))

    def went_back(self, resumed: Resumed, step: int | None, fuzzy: dict[int, ModelItem]) -> None:
        """Check what a resume brought back, and let the model go back as well."""
        model = self.model
        number = max(n for n, each in model.generations.items() if step in (None, each.half.step))
        assert resumed.generation == number
        found = model.generations[number]
        assert (self.trainer.batches, resumed.step) == (found.batches, found.half.step)
        model.resume(found)
        # What a life took over as it found it was perhaps older there than it is, if that life then came to nothing.
        for uid in self.unsure & self.pipe.ledger.entries.keys() & model.items.keys() - fuzzy.keys():
            entry, item = self.pipe.ledger.entries[uid], model.items[uid]
            assert not item.results or entry.effective >= item.effective
            item.effective, item.results = entry.effective, dict.fromkeys(item.results, (entry.effective, entry.made))
            self.marks[0][1].items[uid] = item.copy()
        self.adopted, self.unsure = self.unsure, set()
        if found.whole and not model.discard:
            self.adopted |= fuzzy.keys()
            for uid, item in fuzzy.items():
                self.adopt(uid, item)
                self.marks[0][1].items.pop(uid, None)
                if uid in model.items:
                    self.marks[0][1].items[uid] = model.items[uid].copy()
        if self.may_be_older:  # the life that was cut at its beginning may have had older weights
            for uid, entry in self.pipe.ledger.entries.items():
                model.items[uid].effective = min(model.items[uid].effective, entry.effective)
            self.may_be_older = False
        came = [lease.uids for lease in self.pipe._run.state.pending]
        for hints in (model.hints, self.more_hints):
            model.find_pending(found, hints)
            if came == self.uids_of(model.pending):
                model.hints = self.marks[0][1].hints = hints
                break

    def adopt(self, uid: int, item: ModelItem) -> None:
        """A crash came amid what happened to an item: take it as it was found, for it may be anywhere in between."""
        model, entry = self.model, self.pipe.ledger.entries.get(uid)
        found = model.items[uid] = item.copy()
        if model.state(uid) == "trained":
            return
        if self.pipe.ledger.state(uid) == "future":
            del model.items[uid]
        elif entry is not None:
            found.members = [MEMBERS[each] for each in entry.members]
            found.failures, found.given = list(entry.failures), {member for member, _ in entry.given}
            found.life, found.rerolls, found.effective, found.dropped = entry.life, entry.rerolls, entry.effective, None
            found.interruptions = entry.interruptions
            done = [n for n, each in enumerate(found.members) if each in ("finished", "unrewarded")]
            found.results = dict.fromkeys(done, (entry.effective, entry.made))

    @staticmethod
    def uids_of(leases: dict[int, list[tuple[int, int]]]) -> list[list[int]]:
        return [[uid for uid, _ in lease] for lease in leases.values()]

    def on_disk(self) -> set[int]:
        layout = Layout(self.directory)
        run = layout.read_run()
        return {each.manifest.generation for each in find_generations(layout, run.run_id).complete} if run else set()

    def committed(self, made: Generation) -> None:
        """Exactly one generation has come; old ones may have gone."""
        there, known = self.on_disk(), self.model.generations
        (number,) = there - known.keys()
        assert self.options["keep"] is not None or known.keys() <= there
        self.model.generations = {n: known.get(n, made) for n in sorted(there)}
        assert number == max(there)

    def fresh(self) -> Model:
        reroll, discard = self.options["staleness_policy"] == "reroll", self.options["after_crash"] == "discard"
        model = Model(self.bound, self.options["max_rerolls"], reroll, discard, ATTEMPTS)
        model.shares = dict.fromkeys(PLANS, 1.0)
        return model

    # -- the end of a life ---------------------------------------------------------------------------------------------

    async def stop_waiting(self) -> None:
        for task in (self.asking, self.updating):
            if task is not None:
                task.cancel()

    def leave(self) -> None:
        self.loop.run_until_complete(self.pipe.__aexit__(None, None, None))
        self.seen.clear()

    def fall_back(self, changes: list[Change], kept: int, *, torn: bool) -> bool:
        """Go on in the folder as it was after ``kept`` changes. Returns whether a part of the next one was done."""
        replay = Replay(self.base)
        replay.forward(changes, kept)
        torn = torn and kept < len(changes) and changes[kept].verb == "write"
        if torn:
            replay.tear(changes[kept], 0.7)
        self.directory = self.base
        return torn

    def what_is_left(self, kept: int, torn: bool) -> dict[int, ModelItem]:
        """Take the model back to a crash. Returns the items that it came amid something that happened to."""
        place = max(n for n, (count, _) in enumerate(self.marks) if count <= kept)
        count, low = self.marks[place]
        self.model = low.copy()
        self.unsure = self.adopted if place == 0 else set()
        self.more_hints = self.model.hints
        if count == kept and not torn:
            return {}
        high = self.marks[place + 1][1]
        there = self.on_disk()
        known = {**high.generations, **low.generations}
        assert low.generations.keys() & high.generations.keys() <= there <= known.keys()
        before = low.items
        if place == 0 and there - low.generations.keys():
            self.model = high.copy()
            before = known[max(there)].items
        elif place == 0:  # the resume did not happen
            self.model.line, self.may_be_older = -1, True
            before = high.items
        self.model.generations = {number: known[number] for number in sorted(there)}
        self.more_hints = high.hints
        return {
            uid: high.items.get(uid) or before[uid]
            for uid in before.keys() | high.items.keys()
            if uid not in before or uid not in high.items or before[uid].at_rest() != high.items[uid].at_rest()
        }
