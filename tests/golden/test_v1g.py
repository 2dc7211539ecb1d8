"""A run whose generations say how the buffer draws that its rollouts fill: what is drawn next is known without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.checkpoint import verify
from pipeline.checkpoint.generations import find_generations
from pipeline.replay.looking import look_at
from pipeline.replay.state import read_buffer_state
from pipeline.store.layout import Layout
from tests.golden.make_v1e import OPTIONS, task
from tests.golden.make_v1g import buffer
from tests.support.disk import says_no_machine
from tests.support.experience import Agent
from tests.support.runs import pipeline

HERE = Path(__file__).parent / "v1g"


def test_nothing_of_the_machine_that_made_it_is_in_the_files() -> None:
    says_no_machine(HERE, most=80_000)


def test_it_is_whole(directory: str) -> None:
    found = verify(directory)
    assert (found.damages, found.generations) == ([], 2)


def test_it_says_how_the_buffer_draws() -> None:
    state, _ = read_buffer_state(str(HERE / "generations/00000004"))
    assert state.options["select"] == {"select": "uniform", "uses": 3, "window": None, "window_trajectories": 4}
    assert (state.options["seed"], state.options["returns"]) == (9, "torch")


@pytest.mark.virtual_time
async def test_what_comes_next_is_known_without_the_run(directory: str) -> None:
    layout = Layout(directory)
    marker = layout.read_run()
    assert marker is not None
    looked = look_at(layout, marker.tag, find_generations(layout, marker.run_id).complete[-1])
    drawn = [looked.sample(4).keys.tolist() for _ in range(3)]
    rows = buffer()
    async with pipeline(task(), directory=directory, buffer=rows, inline=True, **OPTIONS) as pipe:
        pipe.attach(agent=Agent())
        assert (await pipe.resume()).step == 5
        assert rows.ring.added == looked.ring.added
        assert [rows.sample(4).keys.tolist() for _ in range(3)] == drawn == DRAWN


DRAWN = [[167, 162, 143, 168], [164, 167, 142, 169], [162, 141, 152, 159]]
