"""A callback that follows the trainer's steps and checkpoints."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tasks.trl.worker import RolloutWorker


def following(worker: RolloutWorker) -> Any:
    """Return a ``TrainerCallback`` that tells a worker what the trainer has done."""
    from transformers import TrainerCallback

    class Following(TrainerCallback):  # type: ignore[misc]
        """Comes before the callbacks of the trainer's own, so that a version's steps are acked when it is pushed."""

        begun = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.begun = state.global_step

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.is_world_process_zero:
                worker._trained(state.global_step - self.begun)

        def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.is_world_process_zero:
                worker._saved(os.path.join(args.output_dir, f"checkpoint-{state.global_step}"))

    return Following()
