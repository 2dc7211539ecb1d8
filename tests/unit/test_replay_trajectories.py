"""``TrajectoryBuffer``: trajectories of tensors [T, B, ...], of which transitions are sampled."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import ClosedError, ConfigError, Starved, TrajectoryBuffer, TrajectoryOptions, intervention_pieces
from pipeline.replay import TrajectoryInfo


def trajectory(number: int, steps: int = 4, envs: int = 3, epochs: int = 0, **more: Any) -> dict[str, Any]:
    """Every field of step t of environment b tells ``(number, t, b)``; ends tell where they were, counting resets."""
    where = torch.empty(steps, envs, 3, dtype=torch.int64)
    where[..., 0] = number
    where[..., 1] = torch.arange(steps)[:, None]
    where[..., 2] = torch.arange(envs)
    rewards = (1000 * number + 10 * where[..., 1] + where[..., 2]).float()
    fields = {
        "actions": where,
        "rewards": rewards,
        "curr_obs": {"states": rewards[..., None], "image": _image(rewards)},
    }
    if epochs:
        length = steps // epochs
        ends = torch.full((epochs, length + 1, envs), -1.0)
        ends[:, 1:] = rewards.reshape(epochs, length, envs)
        values = torch.full((epochs, length + 1, envs), -1.0)
        values[:, :-1] = ends[:, 1:]
        fields |= {"dones": ends.flatten(0, 1), "prev_values": values.flatten(0, 1)[..., None]}
    return fields | more


def _image(rewards: torch.Tensor) -> torch.Tensor:
    return rewards.to(torch.int64)[..., None].expand(*rewards.shape, 2048).to(torch.uint8)


def rows(number: int, steps: int = 4, envs: int = 3) -> list[float]:
    """What the rewards of a trajectory's transitions are, step-major."""
    return [1000.0 * number + 10 * step + env for step in range(steps) for env in range(envs)]


def whole(buffer: TrajectoryBuffer) -> list[float]:
    found: list[float] = buffer.arrays()["rewards"].tolist()
    return found


def drawn(buffer: TrajectoryBuffer, times: int = 50) -> set[float]:
    found: set[float] = set()
    for _ in range(times):
        found |= set(buffer.sample(1 + buffer.get_stats()["window_samples"])["rewards"].tolist())
    return found


def aligned(batch: dict[str, Any]) -> None:
    """Every field of a row is of the same step of the same environment of the same trajectory."""
    number, step, env = batch["actions"].T
    want = (1000 * number + 10 * step + env).float()
    assert torch.equal(batch["rewards"], want)
    assert torch.equal(batch["curr_obs"]["states"][:, 0], want)
    assert torch.equal(batch["curr_obs"]["image"], _image(want))
    for name in ("dones", "prev_values"):
        if name in batch:
            assert torch.equal(batch[name].reshape(-1), want)


# --- what is stored


def test_a_trajectory_is_flattened_step_by_step() -> None:
    buffer = TrajectoryBuffer()
    assert buffer.add_trajectories([trajectory(1), trajectory(2, steps=2, envs=1)]) == range(2)
    assert whole(buffer) == rows(1) + rows(2, 2, 1)
    assert (len(buffer), buffer.total_samples) == (2, 14)
    assert buffer.infos()[1] == TrajectoryInfo(1, 2, (2, 1))


@pytest.mark.parametrize("epochs", [1, 2, 4])
def test_the_rows_that_some_fields_have_more_are_dropped_in_each_epoch(epochs: int) -> None:
    buffer = TrajectoryBuffer()
    buffer.add_trajectories([trajectory(1, epochs=epochs)])
    arrays = buffer.arrays()
    assert arrays["dones"].tolist() == rows(1)  # without the first row of each epoch
    assert arrays["prev_values"][:, 0].tolist() == rows(1)  # without the last
    aligned(buffer.sample(12))
    assert buffer.trajectory(0)["dones"].shape == (4, 3)


def test_fields_may_be_of_any_dtype_and_come_back_so() -> None:
    kinds = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
    for kind in kinds:
        value = torch.arange(6).reshape(3, 2).to(kind)
        buffer = TrajectoryBuffer()
        buffer.add_trajectories([{"x": value, "y": torch.zeros(3, 2, 5)}])
        assert buffer.sample(4)["x"].dtype == kind
        assert torch.equal(buffer.trajectory(0)["x"], value)


def test_objects_with_attributes_and_arrays_are_taken() -> None:
    @dataclasses.dataclass
    class Trajectory:
        max_episode_length: int = 7
        model_weights_id: str = "abc"
        rewards: Any = None
        actions: Any = None
        forward_inputs: dict[str, Any] = dataclasses.field(default_factory=dict)

    class Other:
        def __init__(self) -> None:
            self.rewards = np.ones((2, 3), np.float32)

    buffer = TrajectoryBuffer()
    buffer.add_trajectories([Trajectory(rewards=np.ones((2, 3), np.float32)), Other()])
    assert buffer.infos() == [TrajectoryInfo(0, 6, (2, 3), 7, "abc"), TrajectoryInfo(1, 6, (2, 3))]
    back = buffer.trajectory(0)
    assert (back["max_episode_length"], back["model_weights_id"]) == (7, "abc")
    assert back["rewards"].tolist() == [[1.0] * 3] * 2


def test_what_goes_in_is_copied_and_what_comes_out_is_the_callers() -> None:
    buffer, given = TrajectoryBuffer(), trajectory(1)
    buffer.add_trajectories([given])
    given["rewards"][:] = 0
    for out in (buffer.sample(12), buffer.trajectory(0)):
        out["rewards"][:] = -5
    buffer.arrays()["rewards"][:] = -5
    assert whole(buffer) == rows(1)


# --- which are sampled


def test_every_transition_of_the_window_is_drawn_alike() -> None:
    buffer = TrajectoryBuffer(seed=5)
    buffer.add_trajectories([trajectory(1, steps=1, envs=1), trajectory(2, steps=3, envs=3)])
    found: dict[float, int] = {}
    for _ in range(2000):
        batch = buffer.sample(10)
        aligned(batch)
        for reward in batch["rewards"].tolist():
            found[reward] = found.get(reward, 0) + 1
    assert set(found) == {*rows(1, 1, 1), *rows(2, 3, 3)}
    assert all(abs(count - 2000) < 220 for count in found.values())  # five standard deviations


@pytest.mark.parametrize(
    ("window", "numbers"), [(0, {1, 2, 3}), (-5, {1, 2, 3}), (1, {3}), (2, {2, 3}), (9, {1, 2, 3})]
)
def test_only_the_newest_trajectories_are_drawn_from(window: int, numbers: set[int]) -> None:
    buffer = TrajectoryBuffer()
    buffer.add_trajectories([trajectory(1), trajectory(2, 1, 2), trajectory(3, 2, 2)])
    buffer.sample_window_size = window
    assert buffer.sample_window_size == window
    assert {int(reward // 1000) for reward in drawn(buffer)} == numbers
    assert len(buffer) == 3


def test_no_more_than_the_window_has_is_returned_and_a_strict_choice_raises() -> None:
    for strict in (False, True):
        buffer = TrajectoryBuffer(sample_window_size=1, strict=strict)
        buffer.add_trajectories([trajectory(1), trajectory(2, 2, 1)])
        assert len(buffer.sample(100, strict=False)["rewards"]) == 2
        assert len(buffer.sample(2)["rewards"]) == 2
        with pytest.raises(Starved, match="num_chunks=3, and the window has 2 transitions"):
            buffer.sample(3, strict=True)
    with pytest.raises(Starved, match="the window has 2"):
        buffer.sample(3)


@pytest.mark.parametrize("cleared", [False, True])
def test_nothing_can_be_sampled_of_an_empty_buffer(cleared: bool) -> None:
    buffer = TrajectoryBuffer()
    if cleared:
        buffer.add_trajectories([trajectory(1)])
        buffer.clear()
    assert buffer.add_trajectories([]) == range(int(cleared), int(cleared))
    with pytest.raises(Starved, match="add trajectories first"):
        buffer.sample(1)
    assert (len(buffer), buffer.total_samples, buffer.arrays()) == (0, 0, {})
    assert not buffer.is_ready(1)


# --- which are held


def test_the_oldest_go_where_there_are_more_than_are_held() -> None:
    buffer = TrajectoryBuffer(cache_size=3, sample_window_size=2)
    for number in range(1, 40):
        buffer.add_trajectories([trajectory(number, 1 + number % 4, 1 + number % 3)])
        held = range(max(1, number - 2), number + 1)
        assert whole(buffer) == [each for n in held for each in rows(n, 1 + n % 4, 1 + n % 3)]
        assert [info.trajectory_id for info in buffer.infos()] == [n - 1 for n in held]
        assert {int(reward // 1000) for reward in drawn(buffer, 20)} == set(held[-2:])
        aligned(buffer.sample(5))
    assert buffer.get_stats()["memory_bytes"] < 60 * 2200
    assert buffer.trajectory_counter == 39


def test_of_more_than_are_held_at_once_the_newest_stay() -> None:
    buffer = TrajectoryBuffer(cache_size=2, sample_window_size=2)
    buffer.add_trajectories([trajectory(9)])
    assert buffer.add_trajectories([trajectory(number) for number in range(1, 6)]) == range(1, 6)
    assert whole(buffer) == rows(4) + rows(5)
    assert [info.trajectory_id for info in buffer.infos()] == [4, 5]


def test_as_many_are_held_as_the_largest_window_so_far() -> None:
    buffer = TrajectoryBuffer(sample_window_size=2)
    for number in range(1, 5):
        buffer.add_trajectories([trajectory(number)])
    assert len(buffer) == 2
    buffer.sample_window_size = 3
    buffer.add_trajectories([trajectory(5)])
    assert len(buffer) == 3
    buffer.sample_window_size = 1
    buffer.add_trajectories([trajectory(6)])
    assert len(buffer) == 3
    buffer.sample_window_size = 0
    buffer.add_trajectories([trajectory(7), trajectory(8)])
    assert len(buffer) == 5
    assert whole(buffer) == [each for number in range(4, 9) for each in rows(number)]


@pytest.mark.parametrize("seed", range(3))
def test_a_random_history_is_that_of_a_plain_list(seed: int) -> None:
    rng = np.random.default_rng(seed)
    buffer, cache = TrajectoryBuffer(cache_size=6, sample_window_size=4), 6
    model: list[tuple[int, int, int]] = []
    for number in range(60):
        added = [(number, int(rng.integers(1, 7)), int(rng.integers(1, 4))) for _ in range(rng.integers(0, 9))]
        buffer.add_trajectories([trajectory(*each) for each in added])
        model = [*model, *added][-cache:]
        if rng.random() < 0.2:
            buffer.clear_cache()
        if rng.random() < 0.05:
            buffer.clear()
            model = []
        if rng.random() < 0.3:
            buffer.sample_window_size = int(rng.integers(1, 7))
        assert len(buffer) == len(model)
        if not model:
            continue
        assert whole(buffer) == [value for each in model for value in rows(*each)]
        window = [value for each in model[-buffer.sample_window_size :] for value in rows(*each)]
        assert buffer.get_stats()["window_samples"] == len(window)
        batch = buffer.sample(64)
        aligned(batch)
        assert set(batch["rewards"].tolist()) <= set(window)


def test_clearing_the_cache_loses_nothing_and_gives_memory_back() -> None:
    buffer = TrajectoryBuffer(cache_size=2, sample_window_size=1)
    buffer.clear_cache()
    for number in range(1, 8):
        buffer.add_trajectories([trajectory(number, 8 if number == 1 else 2)])
    before, stats = whole(buffer), buffer.get_stats()
    buffer.clear_cache()
    assert whole(buffer) == before
    assert buffer.get_stats()["memory_bytes"] < stats["memory_bytes"]
    assert buffer.get_stats() | {"memory_bytes": 0} == stats | {"memory_bytes": 0}


def test_stats_say_how_the_buffer_stands() -> None:
    buffer = TrajectoryBuffer(sample_window_size=1)
    buffer.sample_window_size = 5
    buffer.sample_window_size = 1
    buffer.add_trajectories([trajectory(1), trajectory(2, 2, 2)])
    stats = buffer.get_stats()
    assert (stats["num_trajectories"], stats["total_samples"], stats["cache_size"]) == (2, 16, 2)
    assert (stats["window_samples"], stats["trajectory_counter"]) == (4, 2)
    assert buffer.is_ready(2)
    assert not buffer.is_ready(3)


def test_numbers_are_not_used_again_after_a_clear_and_fields_may_change() -> None:
    buffer = TrajectoryBuffer()
    buffer.add_trajectories([trajectory(1)])
    buffer.clear()
    assert buffer.add_trajectories([{"x": torch.zeros(2, 2)}]) == range(1, 2)
    assert list(buffer.sample(1)) == ["x"]


def test_nothing_is_done_with_a_closed_buffer() -> None:
    buffer = TrajectoryBuffer()
    buffer.add_trajectories([trajectory(1)])
    buffer.close()
    buffer.close()
    for act in (
        lambda: buffer.sample(1),
        lambda: buffer.add_trajectories([trajectory(1)]),
        buffer.state_dict,
        buffer.clear,
    ):
        with pytest.raises(ClosedError, match="closed"):
            act()


# --- state


def plain(buffer: TrajectoryBuffer) -> Any:
    """Everything that a buffer holds, in values that can be compared."""
    state = buffer.state_dict()
    return state["state"], buffer.infos(), {name: array.tolist() for name, array in state["rows"].items()}


@pytest.mark.parametrize("number", [0, 1, 7])
def test_after_loading_the_same_is_sampled_as_would_have_been(number: int) -> None:
    buffer = TrajectoryBuffer(cache_size=4, sample_window_size=2, seed=3)
    for each in range(number):
        buffer.add_trajectories([trajectory(each, 1 + each, epochs=1, max_episode_length=each, model_weights_id="w")])
        buffer.sample(7)
    twin = TrajectoryBuffer(cache_size=4, sample_window_size=2, seed=8)
    twin.add_trajectories([trajectory(99)])
    twin.load_state_dict(buffer.state_dict())
    assert plain(twin) == plain(buffer)
    for each in range(100, 106):
        for one in (buffer, twin):
            one.add_trajectories([trajectory(each, epochs=2)])
        left, right = buffer.sample(32), twin.sample(32)
        aligned(right)
        assert torch.equal(left["actions"], right["actions"])
    assert twin.arrays()["actions"].tolist() == buffer.arrays()["actions"].tolist()


@pytest.mark.parametrize(
    ("options", "held", "drawn_from"),
    [
        ({"cache_size": 2, "sample_window_size": 1}, [5, 6], {6}),
        ({"cache_size": 4, "sample_window_size": 3}, [3, 4, 5, 6], {4, 5, 6}),
        ({"capacity": 3, "sample_window_size": 0}, [4, 5, 6], {4, 5, 6}),
        ({"sample_window_size": 2}, [5, 6], {5, 6}),
        ({"sample_window_size": 0}, [1, 2, 3, 4, 5, 6], {1, 2, 3, 4, 5, 6}),
    ],
)
def test_the_window_and_the_cache_that_are_set_count_after_loading(
    options: dict[str, Any], held: list[int], drawn_from: set[int]
) -> None:
    buffer = TrajectoryBuffer(cache_size=6, sample_window_size=6)
    buffer.add_trajectories([trajectory(number, 1 + number) for number in range(1, 7)])
    twin = TrajectoryBuffer(**options)
    twin.load_state_dict(buffer.state_dict())
    assert whole(twin) == [each for number in held for each in rows(number, 1 + number)]
    assert [info.trajectory_id + 1 for info in twin.infos()] == held
    assert {int(reward // 1000) for reward in drawn(twin)} == drawn_from
    assert twin.sample_window_size == options["sample_window_size"]
    assert twin.add_trajectories([trajectory(7)]) == range(6, 7)


def test_what_is_no_state_is_refused_and_nothing_is_changed() -> None:
    buffer = TrajectoryBuffer()
    buffer.add_trajectories([trajectory(1, model_weights_id="w"), trajectory(2)])
    good = buffer.state_dict()
    state, values, arrays = good["state"], good["values"], good["rows"]
    wrong: list[Any] = [
        {},
        None,
        {**good, "state": {}},
        {**good, "state": {**state, "size": "two"}},
        {**good, "state": {**state, "size": 3}},
        {**good, "state": {**state, "total_samples": 23}},
        {**good, "state": {**state, "columns": None}},
        {**good, "state": {**state, "columns": [{"name": "", "dtype": "float32"}]}},
        {**good, "state": {**state, "generator": {"name": "PCG64"}}},
        {**good, "state": {**state, "weights": []}},
        {**good, "values": {}},
        {**good, "values": {**values, "steps.int64": values["steps.int64"] * 0}},
        {**good, "values": {**values, "envs.int64": [1]}},
        {**good, "rows": {}},
        {**good, "rows": {**arrays, "rewards": arrays["rewards"][:-1]}},
        {**good, "rows": {**arrays, "rewards": arrays["rewards"].astype(int)}},
        {**good, "rows": {**arrays, "rewards": arrays["rewards"].tolist()}},
    ]
    twin = TrajectoryBuffer()
    twin.add_trajectories([{"x": torch.zeros(2, 2)}])
    before = plain(twin)
    for each in wrong:
        with pytest.raises(ConfigError, match=r"no state of a buffer of trajectories|24 rows of it are needed"):
            twin.load_state_dict(each)
        assert plain(twin) == before
    twin.load_state_dict(good)
    assert plain(twin) == plain(buffer)


def test_no_global_generator_is_touched() -> None:
    np.random.seed(1)
    torch.manual_seed(1)
    before = (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
    buffer = TrajectoryBuffer(seed=9)
    buffer.add_trajectories([trajectory(1)])
    buffer.sample(5)
    after = (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
    assert before == after


# --- threads


def test_no_batch_mixes_two_trajectories_in_a_row_under_a_writer_and_readers() -> None:
    buffer = TrajectoryBuffer(cache_size=3, sample_window_size=3)
    buffer.add_trajectories([trajectory(0)])
    failed: list[BaseException] = []
    over = threading.Event()

    def read() -> None:
        try:
            while not over.is_set():
                aligned(buffer.sample(64))
        except BaseException as error:
            failed.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(300):
        buffer.add_trajectories([trajectory(number % 250, 1 + number % 5, 1 + number % 3)])
    over.set()
    for reader in readers:
        reader.join()
    assert not failed


# --- what is refused, before anything is changed


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"rewards": None}, "rewards missing"),
        ({"more": torch.zeros(4, 3)}, "more unknown"),
        ({"curr_obs": {"states": torch.zeros(4, 3, 1)}}, "curr_obs.image missing"),
        ({"actions": torch.zeros(4, 3, 2, dtype=torch.int64)}, r"column actions: shape \[2\] in a row, \[3\] expected"),
        ({"actions": torch.full((4, 3, 3), 0.5)}, "column actions: float32 values that int64 cannot hold"),
        ({"actions": torch.zeros(5, 3, 3)}, r"field actions: shape \[5, 3, 3\], where \[4, 3, ...\] is needed"),
        ({"actions": torch.zeros(4, 2, 3)}, "field actions: shape"),
        ({"actions": torch.zeros(4)}, r"field actions: shape \[4\], where \[T, B, ...\] is needed"),
        ({"actions": ["a"]}, "field actions: a list"),
        ({"dones": torch.zeros(7, 3)}, r"field dones: shape \[7, 3\].* or \[4 \+ E, 3, ...\] where E divides 4"),
        ({"dones": torch.zeros(3, 3)}, "field dones: shape"),
        ({"rewards": torch.zeros(0, 3)}, "no transition in it"),
        ({"max_episode_length": "long"}, "max_episode_length='long'"),
        ({"curr_obs": {"a": {"b": torch.zeros(4, 3)}, "a.b": torch.zeros(4, 3)}}, "would be called so"),
    ],
)
def test_a_trajectory_that_does_not_fit_leaves_nothing_behind(bad: dict[str, Any], match: str) -> None:
    buffer = TrajectoryBuffer()
    buffer.add_trajectories([trajectory(1)])
    before = plain(buffer)
    with pytest.raises(ConfigError, match=match):
        buffer.add_trajectories([trajectory(2), {**trajectory(3), **bad}])
    assert plain(buffer) == before
    aligned(buffer.sample(12))


@pytest.mark.parametrize("nothing", [{}, {"rewards": None}, object(), 3])
def test_what_has_no_tensor_is_refused(nothing: Any) -> None:
    buffer = TrajectoryBuffer()
    with pytest.raises(ConfigError, match="no field with a tensor"):
        buffer.add_trajectories([nothing])
    assert plain(buffer) == plain(TrajectoryBuffer())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"cache_size": 0}, "cache_size=0"),
        ({"cache_size": 3, "sample_window_size": 4}, "older trajectories are not in memory"),
        ({"cache_size": 3, "sample_window_size": 0}, "older trajectories are not in memory"),
        ({"seed": -1}, "seed=-1"),
        ({"sample_window_size": "all"}, "sample_window_size='all'"),
        ({"capacity": 0}, "capacity=0"),
        ({"size": 3}, "no option 'size'"),
        ({"auto_save": True}, "nowhere to write to"),
        ({"keep": 0}, "keep=0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        TrajectoryBuffer(**options)


@pytest.mark.parametrize("number", [0, -1, 2.5, True])
def test_a_number_of_chunks_is_needed(number: Any) -> None:
    buffer = TrajectoryBuffer()
    buffer.add_trajectories([trajectory(1)])
    with pytest.raises(ConfigError, match="num_chunks="):
        buffer.sample(number)
    with pytest.raises(ConfigError, match="number=4: 0 to 0 are there"):
        buffer.trajectory(4)
    with pytest.raises(ConfigError, match="sample_window_size"):
        buffer.sample_window_size = 1.5  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="older trajectories"):
        TrajectoryBuffer(cache_size=3, sample_window_size=3).sample_window_size = 4


# --- pieces of interventions


def flagged(flags: list[list[list[bool]]], **options: Any) -> dict[str, Any]:
    """A trajectory of 4 steps of 3 environments, with flags by environment, step and dimension."""
    return trajectory(1, intervene_flags=torch.tensor(flags).permute(1, 0, 2), **options)


FLAGS = [
    [[False, False], [True, False], [True, True], [False, False]],
    [[False, False]] * 4,
    [[True, True], [False, True], [False, False], [True, True]],
]


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize(("mode", "want"), [("any", {0: [1, 2], 2: [0, 1, 3]}), ("all", {0: [2], 2: [0, 3]})])
def test_the_steps_of_an_intervention_are_cut_out_with_their_ends(mode: Any, want: Any, epochs: int) -> None:
    pieces = intervention_pieces(flagged(FLAGS, epochs=epochs, max_episode_length=9), mode)
    assert len(pieces) == len(want)
    for piece, (env, steps) in zip(pieces, want.items(), strict=True):
        assert piece["actions"].tolist() == [[[1, step, env]] for step in steps]
        expected = [[1000.0 + 10 * step + env] for step in steps]
        assert piece["rewards"].tolist() == piece["dones"].tolist() == expected
        assert piece["prev_values"][..., 0].tolist() == expected
        assert piece["curr_obs"]["states"][..., 0].tolist() == expected
        assert piece["intervene_flags"].shape == (len(steps), 1, 2)
        assert piece["max_episode_length"] == 9
    buffer = TrajectoryBuffer()
    buffer.add_trajectories(pieces)
    assert buffer.total_samples == sum(len(steps) for steps in want.values())
    aligned(buffer.sample(20))


def test_there_is_no_piece_where_nobody_intervened() -> None:
    assert intervention_pieces(trajectory(1)) == []
    assert intervention_pieces(flagged([FLAGS[1]] * 3)) == []
    with pytest.raises(ConfigError, match="mode='some'"):
        intervention_pieces(trajectory(1), "some")  # type: ignore[arg-type]


def test_flags_may_be_one_to_a_step_and_arrays() -> None:
    given = trajectory(1, helped=np.array([[True, False, False]] * 2 + [[False] * 3] * 2))
    pieces = intervention_pieces(given, "all", flags="helped", options=TrajectoryOptions())
    assert [piece["rewards"].tolist() for piece in pieces] == [[[1000.0], [1010.0]]]
    assert pieces[0]["helped"].tolist() == [[True], [True]]
