"""What a trainer makes of a batch: padded tensors with the right mask, and nothing replaced in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline import Batch, Rollout
from pipeline.buffer import Group
from pipeline.errors import Damaged
from pipeline.records import Item, Trace
from pipeline.store.codec import pack


def group(uid: int, *rollouts: Rollout, staleness: int = 0) -> Group:
    item = Item("math", 0, uid * 10, uid)
    blobs = [
        pack(rollout, item, member=member, attempt=1, life=0, versions=(uid, uid + 1))
        for member, rollout in enumerate(rollouts)
    ]
    return Group(
        uid=uid,
        task="math",
        epoch=0,
        index=uid * 10,
        oldest=uid,
        newest=uid + 1,
        staleness=staleness,
        reward_mean=0.0,
        _blobs=blobs,
    )


def batch(*groups: Group) -> Batch:
    return Batch(3, groups, release=lambda step: None)


def ids(*values: int, reward: float = 0.0, **more: Any) -> Rollout:
    return Rollout({"ids": torch.tensor(values, dtype=torch.int64), **more}, reward=reward)


def test_traces_are_stacked_and_padded_at_the_end() -> None:
    made = batch(group(1, ids(1, 2, 3, reward=0.5), ids(4, reward=-1)), group(2, ids(5, 6, reward=2)))
    padded = made.padded()
    assert padded["ids"].tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0]]
    assert padded["ids"].dtype == torch.int64
    assert padded["mask"].tolist() == [[True, True, True], [True, False, False], [True, True, False]]
    assert (padded["lengths"].dtype, padded["lengths"].tolist()) == (torch.int64, [3, 1, 2])
    assert (padded["rewards"].dtype, padded["rewards"].tolist()) == (torch.float32, [0.5, -1, 2])
    assert (padded["group"].dtype, padded["group"].tolist()) == (torch.int64, [0, 0, 1])
    assert set(padded) == {"ids", "mask", "lengths", "rewards", "group"}
    assert made.padded(padding=-7)["ids"].tolist() == [[1, 2, 3], [4, -7, -7], [5, 6, -7]]


def test_every_trace_of_a_rollout_is_a_row() -> None:
    several = Rollout([Trace({"ids": [1, 2]}), Trace({"ids": [3]})], reward=4)
    padded = batch(group(1, several, ids(9, reward=1))).padded()
    assert padded["ids"].tolist() == [[1, 2], [3, 0], [9, 0]]
    assert padded["rewards"].tolist() == [4, 4, 1]
    assert padded["group"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int32, torch.uint64, torch.float16, torch.bfloat16, torch.float64, torch.complex64],
)
def test_the_dtype_stays(dtype: torch.dtype) -> None:
    rows = [torch.tensor([1, 0, 1]).to(dtype), torch.tensor([1]).to(dtype)]
    padded = batch(group(1, *(Rollout({"x": row}) for row in rows))).padded()["x"]
    assert padded.dtype == dtype
    expected = [[1, 0, 1], [1, 0, 0]]
    assert (padded.to(torch.complex64).real if dtype.is_complex else padded.double()).tolist() == expected


def test_shapes_beyond_the_first_dimension_stay() -> None:
    rows = [torch.arange(6).reshape(3, 2), torch.arange(2).reshape(1, 2), torch.zeros((0, 2), dtype=torch.int64)]
    padded = batch(group(1, *(Rollout({"x": row, "n": row.shape[0]}) for row in rows))).padded()
    assert padded["x"].tolist() == [[[0, 1], [2, 3], [4, 5]], [[0, 1], [0, 0], [0, 0]], [[0, 0]] * 3]
    assert padded["n"].tolist() == [3, 1, 0]
    assert padded["n"].shape == (3,)
    assert padded["lengths"].tolist() == [3, 1, 0]


def test_the_length_is_that_of_the_longest_tensor_of_a_trace() -> None:
    rows = [ids(1, 2, extra=torch.ones(4)), ids(1, 2, 3, extra=torch.ones(1))]
    padded = batch(group(1, *rows)).padded()
    assert padded["lengths"].tolist() == [4, 3]
    assert padded["ids"].shape == (2, 3)
    assert padded["extra"].shape == (2, 4)
    assert padded["mask"].shape == (2, 4)


def test_only_names_that_every_trace_has_are_returned() -> None:
    padded = batch(group(1, ids(1, more=[1]), ids(2, other=[2]))).padded()
    assert set(padded) == {"ids", "mask", "lengths", "rewards", "group"}


def test_no_groups_and_no_tensors_give_empty_tensors() -> None:
    padded = batch().padded()
    assert {name: tuple(tensor.shape) for name, tensor in padded.items()} == {
        "lengths": (0,),
        "mask": (0, 0),
        "rewards": (0,),
        "group": (0,),
    }
    assert batch(group(1, Rollout(reward=1))).padded()["rewards"].tolist() == []
    assert batch(group(1, Rollout([Trace({})], reward=1))).padded()["rewards"].tolist() == [1]
    assert batch(group(1, Rollout({"n": 3}), Rollout({"n": 4}))).padded()["n"].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        (torch.ones(2, dtype=torch.float64), r"torch.float32 \(2,\) beside torch.float64 \(2,\)"),
        (torch.ones(2, 3), r"torch.float32 \(2,\) beside torch.float32 \(2, 3\)"),
        (torch.tensor(1.0), r"torch.float32 \(2,\) beside torch.float32 \(\)"),
    ],
)
def test_what_cannot_be_one_tensor_is_refused_by_name(other: torch.Tensor, shown: str) -> None:
    made = batch(group(1, Rollout({"x": torch.ones(2)}), Rollout({"x": other})))
    with pytest.raises(ValueError, match=f"'x': cannot be padded into one tensor: {shown}"):
        made.padded()


@pytest.mark.parametrize("name", ["rewards", "mask", "lengths", "group"])
def test_a_tensor_is_never_replaced_by_what_stands_beside_it(name: str) -> None:
    made = batch(group(1, Rollout({name: [1.0]})))
    with pytest.raises(ValueError, match=name):
        made.padded()
    assert made.rollouts[0][name].tolist() == [1.0]


def test_a_batch_is_its_groups_in_order() -> None:
    groups = [group(7, ids(1, reward=1), staleness=1), group(2, ids(2, reward=2), ids(3, reward=3), staleness=4)]
    made = batch(*groups)
    assert list(made) == groups
    assert (len(made), made.uids, made.staleness, made.step) == (2, [7, 2], 4, 3)
    assert made.rewards.tolist() == [1, 2, 3]
    assert [rollout["ids"].tolist() for rollout in made.rollouts] == [[1], [2], [3]]
    assert [each.members for each in made] == [[0], [0, 1]]
    assert (batch().staleness, batch().rewards.tolist()) == (0, [])


def test_the_tensors_of_a_batch_are_the_trainers_to_change() -> None:
    first, again = batch(group(1, ids(1, 2))), batch(group(1, ids(1, 2)))
    first.rollouts[0]["ids"].zero_()
    assert first.padded()["ids"].tolist() == [[0, 0]], "it is unpacked once, and stays as the trainer changed it"
    assert again.padded()["ids"].tolist() == [[1, 2]]
    padded = again.padded()
    padded["ids"].zero_()
    assert again.padded()["ids"].tolist() == [[1, 2]]


def test_releasing_tells_the_pipeline_once() -> None:
    told: list[int] = []
    made = Batch(4, [], release=told.append)
    made.release()
    made.release()
    assert told == [4]
    assert made.released


def test_a_payload_that_is_damaged_in_memory_says_whose_it_is() -> None:
    broken = Group(
        uid=5, task="a", epoch=0, index=0, oldest=0, newest=0, staleness=0, reward_mean=0.0, _blobs=[b"\0" * 20]
    )
    with pytest.raises(Damaged, match="payload of uid 5"):
        _ = broken.rollouts
