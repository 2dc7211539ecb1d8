"""A rollout worker for TRL's asynchronous GRPO trainer: its samples come from a pipeline.

Needs the extra ``trl``: ``pip install 'forebay[trl]'``; nothing of it is imported before a worker is made. ::

    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
    from tasks.trl import RolloutWorker

    args = AsyncGRPOConfig("out", per_device_train_batch_size=64, token_budget=0, max_steps=1000)
    pipe = Pipeline([task], directory="runs/a", max_staleness=2, concurrency=256)  # Task(group_size=8, epochs=None)
    with RolloutWorker(pipe, args, groups=8) as worker:
        trainer = AsyncGRPOTrainer(
            "Qwen/Qwen3-0.6B",
            args=args,
            train_dataset=prompts,  # its length counts, if there is no max_steps; nothing of it is played
            rollout_worker=worker,
            callbacks=[worker.callback()],
        )
        trainer.train()

**Who pushes weights.** The trainer does, by its own weight transfer: over NCCL to its vLLM server, unless told
otherwise; the worker only learns then which weights are in use. With ``weight_transfer=worker.weight_transfer(push)``
your function pushes them instead, to whatever servers the rollouts use, while no attempt starts.
"""

from __future__ import annotations

from tasks.trl.samples import Samples as Samples
from tasks.trl.transfer import WeightTransfer as WeightTransfer
from tasks.trl.worker import RolloutWorker as RolloutWorker
