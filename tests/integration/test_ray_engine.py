"""Runners in Ray actors: what they do, and what a lost actor, node or trainer costs. Skipped where Ray is not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

os.environ["RAY_AUTH_MODE"] = "disabled"
ray = pytest.importorskip("ray")

from pipeline import (  # noqa: E402
    ConfigError,
    NotServed,
    PeerLost,
    Pipeline,
    RayEngine,
    ReplayBuffer,
    Rollout,
    RunnerRaised,
    Serving,
    ServingError,
    Task,
    UsageError,
    WorkerDied,
    connect,
)
from pipeline.config import RayOptions  # noqa: E402
from tests.support import cluster_driver, in_workers, on_cluster  # noqa: E402
from tests.support.children import child  # noqa: E402
from tests.support.experience import ROWS, contents, fed, filled, reaches, resumed  # noqa: E402
from tests.support.runs import ids, pipeline, task  # noqa: E402
from tests.support.workers import items, rollouts, run_all  # noqa: E402

# Ray leaves sockets and files to the collector, and warns of its own defaults.
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three nodes, of which the first takes no actors; this process is connected to it."""
    from ray.cluster_utils import Cluster

    node: Any = {"object_store_memory": 100 << 20}
    made: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **node})
    made.nodes = [made.add_node(num_cpus=2, **node) for _ in range(2)]
    ray.init(address=made.address, log_to_driver=False)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def engine(actors: int = 1, per_actor: int = 2, **more: Any) -> RayEngine:
    return RayEngine(actors=actors, per_actor=per_actor, **more)


def trained(found: list[Rollout]) -> list[tuple[int, list[float], float]]:
    return sorted((each["n"].item(), each["noise"].tolist(), each.reward) for each in found)


async def test_rollouts_are_those_of_this_process_though_a_node_is_lost_and_another_comes(cluster: Any) -> None:
    found: list[Rollout] = []
    given = task(60, on_cluster.held_async, on_failure="fail_fast")
    first_node = {"resources": {"node:__internal_head__": 0.001}, "num_cpus": 0}
    gate: Any = ray.remote(on_cluster.Gate).options(name="gate", **first_node).remote(8)
    async with pipeline(given, engine=engine(4), capacity=30) as pipe:
        await pipe.start()
        async for batch in pipe.batches(groups=5):
            found += batch.rollouts
            if batch.step == 3:
                await gate.full.remote()  # as many as can run at once: each node has some
                cluster.remove_node(cluster.nodes.pop(), allow_graceful=False)
                await gate.open.remote()
            if batch.step == 6:
                cluster.nodes.append(cluster.add_node(num_cpus=2, object_store_memory=100 << 20))
        pipe.ledger.check()
        totals = pipe.ledger.totals["numbers"]
        assert (totals.failed, totals.dropped) == (0, {})
        assert totals.interrupted > 0, "the node had attempts"
    assert trained(found) == trained(await run_all(task(60, in_workers.number_async), None))


def test_three_hundred_though_a_node_is_lost_one_comes_and_the_driver_is_killed(cluster: Any, tmp_path: Path) -> None:
    """Every rollout is trained once, and all are those that this process would have made."""
    count, directory, kills = 300, str(tmp_path / "run"), 1
    events = {6: "lost", 12: "comes", 22: "killed", 30: "lost", 36: "comes"}
    while True:
        with child(cluster_driver.driver, directory, count, cluster.address) as process:
            while (said := process.hear())[0] == "step":
                event = events.pop(said[1], None)
                if event == "lost":
                    cluster.remove_node(cluster.nodes.pop(), allow_graceful=False)
                elif event == "comes":
                    cluster.nodes.append(cluster.add_node(num_cpus=2, object_store_memory=100 << 20))
                elif event == "killed":
                    break
                process.pipe.send("on")
            if said[0] == "step":
                process.kill()
                kills -= 1
                continue
        assert said[0] == "trained", said[1]
        break
    assert (kills, events) == (0, {})
    found = [tuple(each) for each in said[1]]
    assert [each[0] for each in found] == list(range(count)), "every id exactly once"
    local = anyio.run(cluster_driver.train_contents, str(tmp_path / "local"), count, None, lambda told: None)
    assert found == [tuple(each) for each in local]


async def test_rows_of_rollouts_come_back_to_the_buffer_of_the_driver(cluster: Any, tmp_path: Path) -> None:
    """And, in its next life, out of the journal."""
    rows = sorted((number, place) for number in range(12) for place in range(2 * ROWS))
    directory = str(tmp_path / "run")
    buffer, again = ReplayBuffer(1000), ReplayBuffer(1000)
    async with fed(buffer, run=on_cluster.walk, engine=engine(2), directory=directory) as pipe:
        await pipe.start()
        await filled(pipe)
        pipe.ledger.check()
        assert sorted(contents(buffer)) == rows
        assert len(await pipe.sample(8)) == 8
    async with fed(again, run=on_cluster.walk, engine=engine(1), directory=directory) as pipe:
        await resumed(pipe)
        assert sorted(contents(again)) == rows


async def test_an_actor_that_is_lost_in_an_episode_costs_that_episode_only(cluster: Any) -> None:
    buffer, where = ReplayBuffer(1000), engine(2)
    async with fed(buffer, run=on_cluster.walk, engine=where, max_deaths=100) as pipe:
        await pipe.start()
        await reaches(pipe, buffer, 5 * ROWS)
        crew: Any = where._async
        ray.kill(next(each for each in crew._workers if each.ready and each.calls)._actor)
        await filled(pipe)
        pipe.ledger.check()
        places: dict[int, list[int]] = {}
        for number, place in contents(buffer):
            places.setdefault(number, []).append(place)
        whole, begun = list(range(2 * ROWS)), list(range(ROWS))
        assert sorted(places) == list(range(12))
        assert all(each in (whole, begun) for each in places.values()), "no row is there twice"
        # One that had rows is not played again; one that had none is.
        totals = pipe.ledger.totals["numbers"]
        assert sum(each == begun for each in places.values()) == totals.retired_early <= totals.interrupted


async def test_tensors_and_errors_cross_and_a_dead_actor_says_so(cluster: Any) -> None:
    local = in_workers.tensors(None, None)  # type: ignore[arg-type]
    async with engine() as where:
        with pytest.raises(UsageError, match="opened before"):
            await where.__aenter__()
        rollout = await where.call(in_workers.tensors, None, None)
        for name, expected in local.traces[0].tensors.items():
            got, wanted = torch.as_tensor(rollout[name]), torch.as_tensor(_plain(expected))
            assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
            assert torch.equal(got, wanted)
        rollout["big"][:] = 5  # nobody else's
        assert rollout.info == local.info
        with pytest.raises(RunnerRaised, match=r"^OwnError: x") as caught:
            await where.call(in_workers.raises, "x")
        assert "In Ray actor" in caught.value.__notes__[0]
        with pytest.raises(WorkerDied, match=r"Ray actor .* was lost while it ran .*:end\(\)") as died:
            await where.call(in_workers.end, "exit")
        assert not died.value.planned
        with pytest.raises(TimeoutError):
            await where.call(in_workers.sleeps, 1000, timeout=0.05)
        assert await where.call(in_workers.add, 1, 2) == 3, "in a new actor"


def _plain(value: Any) -> Any:
    return value.copy() if hasattr(value, "strides") else value


async def test_an_item_that_kills_every_actor_is_quarantined_and_its_neighbours_are_not(cluster: Any) -> None:
    given = task(6, in_workers.poison_async, on_failure="fail_fast")
    async with pipeline(given, engine=engine(per_actor=3), max_deaths=1) as pipe:
        await pipe.start()
        found = [number async for batch in pipe.batches(groups=1) for number in ids(batch)]
        assert sorted(found) == [0, 2, 3, 4, 5]
        assert pipe.ledger.totals["numbers"].dropped == {"quarantined": 1}
        assert pipe.ledger.totals["numbers"].failed == 0


async def test_an_actor_that_is_killed_costs_its_attempts_only(cluster: Any) -> None:
    where = engine(2, max_actors=2)
    async with pipeline(task(40, on_cluster.where_async), engine=where) as pipe:
        await pipe.start()
        found = []
        async for batch in pipe.batches(groups=4):
            found += ids(batch)
            if batch.step == 2:
                crew: Any = where._async
                ray.kill(next(each for each in crew._workers if each.ready)._actor)
        assert sorted(found) == list(range(40))
        totals = pipe.ledger.totals["numbers"]
        assert (totals.failed, totals.dropped) == (0, {})
        assert 1 <= totals.interrupted <= 2


async def test_actors_come_and_go_and_no_more_attempts_run_than_there_are_places(cluster: Any) -> None:
    where = engine(1, max_actors=3)
    given = task(20, on_cluster.where_async, epochs=None)
    async with pipeline(given, engine=where, concurrency=100, capacity=30) as pipe:
        assert pipe.options.concurrency == 6
        await pipe.start()
        first: set[int] = set()
        seen: set[int] = set()
        async for batch in pipe.batches(groups=4):
            pids = {rollout.info["pid"] for rollout in batch.rollouts}
            assert pipe.statistics().rollouts.in_flight <= 6
            assert where.actors <= 3
            if batch.step <= 4:
                first |= pids
            if batch.step == 4:
                await where.resize(actors=3)
            seen |= pids
            if len(seen) == 3:
                break
        assert len(first) == 1
        assert where.actors == 3
        await where.resize(actors=1)
        assert where.actors == 1
        async for batch in pipe.batches(groups=20):
            if len({rollout.info["pid"] for rollout in batch.rollouts}) == 1:
                break
        totals = pipe.ledger.totals["numbers"]
        assert (totals.failed, totals.interrupted) == (0, 0), "who leaves ends what it has"
        for wrong in (0, 4, True, "two"):
            with pytest.raises(ConfigError, match=r"from 1 to max_actors=3"):
                await where.resize(actors=wrong)  # type: ignore[arg-type]


async def test_who_does_not_hear_that_it_is_cut_is_killed_and_replaced(cluster: Any) -> None:
    async with pipeline(task(2, on_cluster.deaf, timeout=1.0), engine=engine(grace_s=0.05)) as pipe:
        await pipe.start()
        assert [rollout.reward for rollout in await rollouts(pipe, 1)] == [0.0, 1.0]
        assert pipe.ledger.totals["numbers"].failed == 2


async def test_verbs_of_the_context_cross(cluster: Any) -> None:
    for run in (in_workers.keeps, in_workers.parks):
        async with pipeline(Task("t", source=items({"n": 3}), run=run), engine=engine()) as pipe:
            await pipe.start()
            if run is in_workers.parks:
                await pipe._run.state.changed.wait_for(lambda: bool(pipe.ledger.parked))
                await pipe.reward(0, 7.0)
            batch = await pipe.get_batch(1)
            if run is in_workers.parks:
                assert batch.rewards.tolist() == [7.0]
            else:
                assert batch.rollouts[0]["made"].tolist() == [1, 1, 2]


def test_a_trainer_that_is_killed_goes_on(cluster: Any, tmp_path: Path) -> None:
    count, kills = 20, 1
    while True:
        with child(on_cluster.trainer, str(tmp_path / "run"), count, cluster.address) as process:
            said = process.hear()
            while said[0] != "seen" and not (kills and said[0] == 2):
                assert said[0] != "raised", said[1]
                said = process.hear()
            if not kills:
                assert said[1] == [1] * count
                return
            process.kill()
            kills -= 1


def there(node: Any, *args: Any) -> Any:
    """Run a trainer on a node; a worker of Ray is as good as another machine."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    trainer: Any = ray.remote(cluster_driver.train_there)
    return trainer.options(scheduling_strategy=where, max_retries=0).remote(*args)


async def test_a_trainer_on_another_node_uses_the_verbs_and_one_that_is_killed_gives_back(
    cluster: Any, tmp_path: Path
) -> None:
    async with pipeline(task(20), directory=str(tmp_path), order="strict") as pipe:
        serving = await pipe.serve(via="ray", name="math")
        assert serving.far_address == "ray://math"
        with pytest.raises(ServingError, match="the name is taken"):
            await Serving(pipe).begin_far("math")
        await pipe.start()
        with pytest.raises(ray.exceptions.WorkerCrashedError):
            await there(cluster.nodes[0], "ray://math", None, True)
        assert list(pipe.ledger.leases) == [1]
        await pipe._run.state.changed.wait_for(lambda: not pipe.ledger.leases)
        node, first = await there(cluster.nodes[0], "ray://math", 3, False)
        assert (node, pipe.ledger.step, pipe.version) == (cluster.nodes[0].node_id, 3, 3)
        _, rest = await there(cluster.nodes[-1], "ray://math", None, False)
        assert first + rest == list(range(20))
    with pytest.raises(NotServed, match="no actor of that name"):
        await connect("ray://math").open()


async def test_the_folder_says_how_it_is_called_and_a_relay_that_dies_is_a_lost_peer(
    cluster: Any, tmp_path: Path
) -> None:
    async with pipeline(task(20), directory=str(tmp_path)) as pipe:
        serving = await pipe.serve(via="ray")
        await pipe.start()
        async with connect(str(tmp_path), via="ray") as far, connect(str(tmp_path)) as near:
            taken = await far.get_batch(4)
            assert not set(taken.uids) & set((await near.get_batch(4)).uids)
            actor = ray.get_actor(serving.far_address.removeprefix("ray://"), namespace="forebay")
            ray.kill(actor, no_restart=False)
            await pipe._run.state.changed.wait_for(lambda: list(pipe.ledger.leases) == [2])
            with pytest.raises(PeerLost):
                await far.get_batch(4)
            async with connect(str(tmp_path), via="ray") as again:
                assert (await again.get_batch(4)).uids == taken.uids


def test_trio_is_refused(cluster: Any) -> None:
    async def main() -> None:
        async with Pipeline(task(1, in_workers.number_async), engine=engine(), watchdog=None):
            pass

    with pytest.raises(UsageError, match="RayEngine needs asyncio, and this event loop is trio's"):
        anyio.run(main, backend="trio")


SCRIPT = """
import signal
import anyio, ray
from forebay import Pipeline, RayEngine, Rollout, SequenceSource, Task
from tests.support.on_cluster import LOCAL

async def solve(item, ctx):
    return Rollout(reward=float(item.content))

async def main():
    engine = RayEngine(actors=1, init=LOCAL)
    async with Pipeline(Task("t", source=SequenceSource([1, 2, 3]), run=solve), engine=engine) as pipe:
        await pipe.start()
        batch = await pipe.get_batch(3)
        print(sorted(batch.rewards.tolist()), ray.is_initialized())
    print(ray.is_initialized(), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)

if __name__ == "__main__":
    anyio.run(main)
"""


def test_a_local_ray_is_started_for_a_script_and_stopped(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[1.0, 2.0, 3.0] True", "False True"]


def test_options_are_checked() -> None:
    for wrong in (
        {"actors": 0},
        {"per_actor": 0},
        {"max_actors": 1},
        {"resources": {"CPU": -1}},
        {"init": {"address": "x"}},
        {"grace_s": -1},
        {"no_such": 1},
    ):
        with pytest.raises(ConfigError):
            RayEngine(wrong)
    options = RayOptions(actors=2, resources={"GPU": 0.5})
    assert RayEngine(options.to_dict()).options == options
    with pytest.raises(ConfigError, match="is defined inside another function"):
        engine().check(Task("t", source=items(1), run=lambda item, ctx: Rollout()))
    assert engine(3, 4).slots([task(1, in_workers.number)]) == 3
    assert engine(3, 4, max_actors=5).slots([task(1, in_workers.number_async)]) == 20
