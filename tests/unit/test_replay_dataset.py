"""A buffer as a dataset: what is drawn ahead, where an iteration ends, and what of it is saved."""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from pipeline import ConfigError, ReplayBuffer, ReplayDataset, UsageError, WithoutReplacement
from tests.support.replaying import fill


def ids(buffer: ReplayBuffer, count: int, batch: int, **options: Any) -> list[list[int]]:
    return [each["x"].tolist() for each in islice(ReplayDataset(buffer, batch, **options), count)]


def filled(count: int, **options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(100, **options)
    buffer.extend({"x": np.arange(count)})
    return buffer


@pytest.mark.parametrize("prefetch", [0, 1, 3, 8])
def test_an_epoch_gives_every_row_whatever_is_drawn_ahead(prefetch: int) -> None:
    dataset = ReplayDataset(filled(10, select=WithoutReplacement(last="keep")), 3, prefetch=prefetch)
    for _ in range(3):
        batches = [batch["x"].tolist() for batch in dataset]
        assert [len(batch) for batch in batches] == [3, 3, 3, 1]
        assert sorted(chain.from_iterable(batches)) == list(range(10))


@pytest.mark.parametrize("prefetch", [0, 1, 3, 8])
def test_rows_that_are_too_few_are_left_out_if_asked(prefetch: int) -> None:
    dataset = ReplayDataset(filled(10, select=WithoutReplacement(last="drop")), 3, prefetch=prefetch)
    for _ in range(3):
        batches = [batch["x"].tolist() for batch in dataset]
        assert [len(batch) for batch in batches] == [3, 3, 3]
        assert len(set(chain.from_iterable(batches))) == 9


def test_what_was_drawn_ahead_is_saved(tmp_path: Path) -> None:
    options: dict[str, Any] = {"directory": tmp_path, "select": WithoutReplacement(last="keep"), "seed": 4}
    buffer = filled(12, **options)
    with buffer:
        dataset = ReplayDataset(buffer, 3, prefetch=2)
        buffer.attach(dataset=dataset)
        batches = iter(dataset)
        first = next(batches)["x"].tolist()
        buffer.save(1, wait=True)
        reference = [batch["x"].tolist() for batch in batches]
    assert len(reference) == 3
    assert sorted(chain(first, *reference)) == list(range(12))
    with ReplayBuffer(100, **options) as again:
        dataset = ReplayDataset(again, 3, prefetch=2)
        again.attach(dataset=dataset)
        again.resume()
        assert [batch["x"].tolist() for batch in dataset] == reference


@pytest.mark.parametrize("more", [{}, {"n_step": 3, "gamma": 0.9}, {"slices": {"length": 3, "pad": True}}])
def test_a_batch_comes_back_whole(tmp_path: Path, more: dict[str, Any]) -> None:
    def made() -> tuple[ReplayBuffer, ReplayDataset]:
        buffer = ReplayBuffer(60, directory=tmp_path, select="prioritized", seed=2)
        dataset = ReplayDataset(buffer, 8, prefetch=3, **more)
        buffer.attach(dataset=dataset)
        return buffer, dataset

    def seen(dataset: ReplayDataset) -> list[Any]:
        found = []
        for batch in islice(dataset, 6):
            parts = [batch.weights, batch.mask, batch.discount, batch.steps, batch.versions, batch.episodes]
            found.append([batch.keys.tolist(), [None if each is None else each.tolist() for each in parts]])
            found.append([batch[name].tolist() for name in ("reward", "terminated", "image")])
            found.append(batch["obs"]["n"].tolist())
        return found

    buffer, dataset = made()
    with buffer:
        fill(buffer, 0, 100)
        next(iter(dataset))
        fill(buffer, 100, 55)  # rows of the batches ahead are overwritten
        buffer.save(1, wait=True)
        expected = seen(dataset)
    again, dataset = made()
    with again:
        again.resume(continue_episodes=True)
        assert seen(dataset) == expected


def test_iterating_goes_on_where_it_was_left() -> None:
    whole = ids(filled(30, seed=3), 6, 4)
    dataset = ReplayDataset(filled(30, seed=3), 4, prefetch=2)
    parts = [[batch["x"].tolist() for batch in islice(dataset, count)] for count in (1, 2, 3)]
    assert list(chain.from_iterable(parts)) == whole


@pytest.mark.parametrize("prefetch", [0, 1, 7])
def test_an_iteration_that_is_left_early_is_gone_on_with_each_time(prefetch: int) -> None:
    """12 rows, left after 5 of them, four times."""
    order = [key for batch in ids(filled(12, select="without_replacement"), 20, 1) for key in batch]
    assert sorted(order[:12]) == list(range(12))
    dataset = ReplayDataset(filled(12, select="without_replacement"), 1, prefetch=prefetch)
    parts = [[int(batch["x"][0]) for batch in islice(dataset, 5)] for _ in range(4)]
    assert parts == [order[0:5], order[5:10], order[10:15], order[15:20]]


def test_on_a_device_it_is_a_dict_of_tensors() -> None:
    batch = next(iter(ReplayDataset(filled(30), 4, device="cpu", prefetch=1)))
    assert set(batch) == {"x", "weights", "keys"}
    assert batch["x"].device == torch.device("cpu")
    assert batch["keys"].tolist() == batch["x"].tolist()


def test_a_data_loader_takes_it_in_the_process_of_the_buffer_alone() -> None:
    dataset = ReplayDataset(filled(30, seed=5), 4)
    loaded = [batch["x"].tolist() for batch in islice(DataLoader(dataset, batch_size=None), 3)]
    assert loaded == ids(filled(30, seed=5), 3, 4)
    with pytest.raises(UsageError, match="num_workers=0"):
        next(iter(DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork")))


def test_nothing_is_pinned_where_there_is_no_device_for_it() -> None:
    if torch.cuda.is_available():
        assert next(iter(ReplayDataset(filled(9), 2, pin_memory=True)))["x"].is_pinned()
    else:
        with pytest.raises(ValueError, match="no CUDA device"):
            ReplayDataset(filled(9), 2, pin_memory=True)


def test_what_it_cannot_do_is_said_when_it_is_built() -> None:
    with pytest.raises(ConfigError, match=r"ReplayDataset has no option 'nstep'; .* n_step"):
        ReplayDataset(filled(9), 2, nstep=3)
    with pytest.raises(ConfigError, match="buffer='list': a ReplayBuffer is needed"):
        ReplayDataset([1, 2], 2)  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device='cuda': there is no CUDA device"):
            ReplayDataset(filled(9), 2, device="cuda")


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_so_many_batches_are_drawn_ahead_as_were_asked_for(prefetch: int) -> None:
    dataset = ReplayDataset(filled(10), 3, prefetch=prefetch)
    next(iter(dataset))
    assert len(dataset.state_dict()["ahead"]) == prefetch


def test_an_epoch_that_was_drawn_ahead_to_its_end_ends_there_after_a_resume_too() -> None:
    buffer = filled(6, select=WithoutReplacement(last="keep"))
    dataset = ReplayDataset(buffer, 3, prefetch=1)
    first = next(iter(dataset))
    again = ReplayDataset(buffer, 3, prefetch=1)
    again.load_state_dict(dataset.state_dict())
    assert sorted(chain(first["x"].tolist(), *(batch["x"].tolist() for batch in again))) == list(range(6))
