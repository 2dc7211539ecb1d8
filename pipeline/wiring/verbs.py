"""The verbs of a pipeline for what is not its own rollouts: rewards, items and rollouts from outside, evaluation.

:class:`~pipeline.Pipeline` has them by inheritance; they stand apart so that both read at one sitting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.records import Rollout
from pipeline.task import Task
from pipeline.wiring.evaluations import Evaluation
from pipeline.wiring.saving_verbs import SavingVerbs


class OutsideVerbs(SavingVerbs):
    """What a pipeline does besides its own rollouts. Each verb happens as a whole, or raises and changes nothing.

    They return once what happened is written (``durability``); cancelled in that wait, they have happened all the same.
    """

    async def reward(self, uid: int, value: float, member: int = 0, *, attempt: int | None = None) -> None:
        """Give a rollout that its runner parked (``ctx.park()``) the reward that it waits for.

        When every member that parked has its reward, the group is buffered. It works after a resume as well, before
        ``start`` or after it. The same reward a second time does nothing, so a sender that does not know whether it
        arrived may send it again.

        While groups are parked, ``get_batch`` waits for their rewards instead of ending. A parked group ages like a
        buffered one: too old for the next batch, it is run again, and a reward for what it was before is refused.

        Args:
            uid: the item's, from ``ctx.uid``.
            value: a finite number; it counts instead of the reward that the runner returned.
            member: the place in the group, from ``ctx.member``.
            attempt: which attempt it is for (``ctx.attempt``). Left out, it goes to whichever is parked now, though the
                group may have been run again since.

        Raises:
            ConfigError: the value is not finite, or there is no such member.
            UsageError: the uid is unknown, trained or dropped; or the member is not parked, or has another reward.
        """
        await self._run.from_outside(lambda outside: outside.reward(uid, value, member, attempt))

    async def discard(self, uid: int) -> None:
        """Give up a parked group, whose reward will not come; it is dropped as ``discarded``.

        Raises:
            UsageError: the group is not parked.
        """
        await self._run.from_outside(lambda outside: outside.discard(uid))

    async def submit(self, task: Task | str, content: Any) -> int:
        """Give a task an item by hand: it is run before anything new is drawn, as soon as there is room for it.

        The content is kept in the journal, so a resume runs it again. It is not part of an epoch and takes nothing from
        the task's share; ``item.index`` is -1 and ``ctx.kind`` is ``"external"``.

        Args:
            task: one of the run's tasks, or its name.
            content: plain values: None, bool, int, float, str, bytes, lists, tuples and dicts.

        Returns:
            The item's uid.

        Raises:
            ConfigError: the run has no such task.
            SourceError: the content cannot be kept.
        """
        return await self._run.from_outside(lambda outside: outside.submit(task, content))

    async def put(self, task: Task | str, rollouts: Rollout | Sequence[Rollout], content: Any = None) -> int:
        """Put a group that was made elsewhere into the buffer: one rollout, or a list of any length.

        Rollouts that say no versions count as made with the weights in use. Once too old for the next batch, the group
        is run again if ``content`` says of what item it is, and dropped as expired if not.

        Returns:
            The group's uid.

        Raises:
            ConfigError: the run has no such task, or a reward is not finite.
            RolloutInvalid: something of it is no rollout.
            SourceError: the content cannot be kept.
        """
        return await self._run.from_outside(lambda outside: outside.put(task, rollouts, content))

    async def set_share(self, task: Task | str, share: float) -> None:
        """Give a task another share of the draws, from the next one on.

        It stays after a resume. But if the task is then made with another ``share=`` than before, that one counts.

        Raises:
            ConfigError: the run has no such task, or the share is no number above 0.
            UsageError: not started.
        """
        await self._run.from_outside(lambda outside: outside.set_share(task, share))

    async def evaluate(
        self,
        task: Task | str,
        version: int | None = None,
        *,
        items: int | Sequence[int] | None = None,
        samples: int = 1,
    ) -> Evaluation:
        """Run the items of a task for their results, beside the training and outside its counts.

        Attempts get ``evaluation_share`` of the slots at most, so the training goes on; they have the task's
        ``timeout`` and ``on_failure``, and ``ctx.kind`` is ``"evaluation"``. A stop cuts it while nothing is leased:
        call ``ack(batch.step)`` before an evaluation that takes long. ``ctx.rng`` gives an item the same numbers
        whatever the version. Cancelling the call cuts what it has in flight.

        With a directory every result is kept as it comes, under the task's name, the version and the index. The same
        call after a crash and a resume, or once more, returns those that are there and runs the others. Results of
        weights that went back with a resume are not used, nor those of another source.

        Args:
            task: one of the run's tasks, or one of its own that is drawn for no batch, such as a held-out set.
            version: results are of these weights, or of newer ones that are pushed meanwhile: each rollout says its
                ``oldest`` and ``newest``. Left out, the version in use.
            items: how many, from the first; or indices. Left out, all of them.
            samples: rollouts of each item.

        Raises:
            ConfigError: there is no such task, version or item.
            RolloutFailed: the task's policy is to stop at a failure. The training goes on.
            SourceError: the source failed.
            Starved: the last ``weight_update`` failed, and nothing can start.
            UsageError: not started, or a ``weight_update`` is open.
        """
        evaluate = self._run.evaluate
        return await self._unless_asked(lambda: evaluate(task, version, items, samples), stop_only=True)
