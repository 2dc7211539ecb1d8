"""Options out of range are refused when they are built, by name; those in range come back from YAML as they went in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from pipeline import ConfigError, FailFast, Pipeline, PipelineOptions, Reroll, Retry, Skip, Task
from pipeline.config import failure_policy
from tests.support.runs import numbers, pipeline, solve, task

NO_COUNT = [0, -1, 1.5, math.nan, math.inf, True, "4", [4], 2**63, 10**400]
NO_NUMBER = [-1, math.nan, math.inf, True, "4", [4], 10**400]
PIPELINE: dict[str, list[Any]] = {
    "concurrency": [*NO_COUNT, None],
    "max_staleness": [-1, 1.5, math.nan, True, "2", 2**63],
    "batch_groups": NO_COUNT,
    "strategy": ["sync", "", None, 1],
    "order": ["random", "", None],
    "selector": ["lifo", "", None],
    "capacity": NO_COUNT,
    "durability": ["disk", "", None, 0],
    "write_queue_bytes": [*NO_COUNT, None],
    "segment_bytes": [*NO_COUNT, None],
    "max_rerolls": [*NO_COUNT[1:], None],
    "max_deaths": [*NO_COUNT[1:], None],
    "seed": [2**63, -(2**63) - 1, 1.5, math.nan, "0", None, True],
    "keep": [each for each in NO_COUNT if each != -1],  # -1 keeps all
    "keep_every": NO_COUNT,
    "watchdog": [0, *NO_NUMBER],
    "rank": [*NO_COUNT[1:], None],
    "oversample": [0, 0.5, *NO_NUMBER, None],
    "mixing": ["", "random", None, 1],
    "staleness_policy": ["", "rerol", None, 5, [], {}, {"policy": "gate"}, {"policy": "reroll", "tail": 0}],
    "directory": ["", "a\0b", 5, True, ["runs"]],
}
TASK: dict[str, list[Any]] = {
    "name": ["", None, 5, "n" * 201, "\ud83d"],
    "source": [None, [1, 2], "train.jsonl"],
    "run": [None, "solve", "sims:play now", 5],
    "group_size": [*NO_COUNT, None],
    "share": [0, *NO_NUMBER, None],
    "on_failure": ["retry twice", "", None, 5, {"policy": "retry", "tries": 3}],
    "min_group": [0, 5, -1, 1.5, True, "1"],
    "timeout": [0, *NO_NUMBER],
    "epochs": NO_COUNT,
    "shuffle": ["no", None, 0, 1],
    "resource": [5, "client"],
}


def cases(table: Mapping[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(option, value, id=f"{option}={str(value)[:20]!r}")
        for option, values in table.items()
        for value in values
    ]


class TestOutOfRange:
    @pytest.mark.parametrize(("option", "value"), cases(PIPELINE))
    def test_of_a_pipeline(self, option: str, value: Any) -> None:
        for build in (
            lambda: pipeline(**{option: value}),
            lambda: Pipeline(task(), {option: value}),
            lambda: PipelineOptions.of({option: value}),
            lambda: PipelineOptions(**{option: value}),
        ):
            with pytest.raises(ConfigError, match=option) as caught:
                build()
            assert caught.value.option == option

    @pytest.mark.parametrize(("option", "value"), cases(TASK))
    def test_of_a_task(self, option: str, value: Any) -> None:
        values: dict[str, Any] = {"name": "numbers", "source": numbers(3), "run": solve, "group_size": 4}
        with pytest.raises(ConfigError, match=option) as caught:
            Task(**{**values, option: value})
        assert caught.value.option == option

    @pytest.mark.parametrize("attempts", [*NO_COUNT, None])
    def test_of_a_retry(self, attempts: Any) -> None:
        for build in (Retry, lambda attempts: failure_policy({"policy": "retry", "attempts": attempts})):
            with pytest.raises(ConfigError, match="attempts"):
                build(attempts)

    def test_one_that_there_is_not_is_named_with_those_that_there_are(self) -> None:
        with pytest.raises(ConfigError, match=r"no option 'max_stalenes'; it has .*max_staleness"):
            pipeline(max_stalenes=3)

    def test_a_batch_larger_than_the_capacity_never_comes(self) -> None:
        """CASES 109."""
        with pytest.raises(ConfigError, match=r"batch_groups=101.*capacity=100"):
            PipelineOptions(capacity=100, batch_groups=101)
        PipelineOptions(capacity=100, batch_groups=100)

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({"staleness_policy": "wait", "max_staleness": None}, "max_staleness= says none"),
            ({"staleness_policy": "gate"}, "order='strict'"),
            ({"staleness_policy": "wait", "selector": "fifo"}, "selector='fifo'"),
            ({"staleness_policy": Reroll(2), "order": "strict"}, "draw order"),
            ({"staleness_policy": Reroll(2), "strategy": "synchronous"}, "draw order"),
        ],
    )
    def test_a_staleness_policy_that_could_not_do_its_part_is_refused(self, options: dict[str, Any], why: str) -> None:
        with pytest.raises(ConfigError, match=rf"staleness_policy=.*{why}") as caught:
            PipelineOptions(**{"max_staleness": 2, **options})
        assert caught.value.option == "staleness_policy"

    @pytest.mark.parametrize(
        "options",
        [
            {"staleness_policy": "gate", "order": "strict"},
            {"staleness_policy": "gate", "strategy": "synchronous"},
            {"staleness_policy": "wait"},
            {"staleness_policy": "wait", "order": "strict", "selector": "fifo"},
            {"staleness_policy": "reroll", "order": "strict"},
            {"staleness_policy": Reroll(2)},
        ],
    )
    def test_and_one_that_can_is_not(self, options: dict[str, Any]) -> None:
        PipelineOptions(max_staleness=2, **options)

    def test_syncing_needs_a_directory(self) -> None:
        with pytest.raises(ConfigError, match=r"durability='power'.*directory"):
            PipelineOptions(durability="power")

    def test_tasks_have_distinct_names_and_there_is_one(self) -> None:
        with pytest.raises(ConfigError, match="distinct"):
            pipeline([task(), task()])
        with pytest.raises(ConfigError, match="at least one"):
            pipeline([])


class TestRoundTrip:
    @pytest.mark.parametrize(
        "options",
        [
            PipelineOptions(),
            PipelineOptions(
                directory="runs/a",
                concurrency=1,
                max_staleness=0,
                batch_groups=3,
                strategy="synchronous",
                order="strict",
                selector="fifo",
                capacity=3,
                durability="power",
                write_queue_bytes=1,
                segment_bytes=2,
                max_rerolls=0,
                max_deaths=0,
                seed=-(2**63),
                keep=None,
                watchdog=None,
                rank=0,
                staleness_policy="gate",
            ),
            PipelineOptions(max_staleness=1, staleness_policy=Reroll(3), oversample=1.25),
            PipelineOptions(max_staleness=1, staleness_policy={"policy": "reroll", "tail": 2}),  # type: ignore[arg-type]
            PipelineOptions(max_staleness=1, staleness_policy="mask", mixing="batch", oversample=2),
            PipelineOptions(seed=2**63 - 1, watchdog=0.25, keep=1),
        ],
    )
    def test_through_yaml(self, options: PipelineOptions) -> None:
        text = yaml.safe_dump(options.to_dict())
        again = PipelineOptions.of(yaml.safe_load(text))
        assert again == options
        assert yaml.safe_dump(again.to_dict()) == text
        assert Pipeline(task(), yaml.safe_load(text)).options == options

    def test_single_options_win_over_the_others(self) -> None:
        built = Pipeline(task(), PipelineOptions(concurrency=3, seed=5), concurrency=7)
        assert (built.options.concurrency, built.options.seed) == (7, 5)

    @pytest.mark.parametrize("policy", [Retry(), Retry(7), FailFast(), Skip()])
    def test_of_what_follows_a_failure(self, policy: Any) -> None:
        assert failure_policy(yaml.safe_load(yaml.safe_dump(policy.to_dict()))) == policy
        given = Task("numbers", source=numbers(3), run=solve, on_failure=policy.to_dict())
        assert given.on_failure == policy
        assert given.describe()["on_failure"] == policy.to_dict()


@pytest.mark.parametrize("value", [1e-300, 5e-324, 1e300])
@pytest.mark.parametrize("option", ["share", "timeout"])
def test_numbers_that_would_end_in_an_infinity_are_refused(option: str, value: float) -> None:
    given: dict[str, Any] = {option: value}
    with pytest.raises(ConfigError, match=f"{option}="):
        task(**given)


@pytest.mark.parametrize("given", [None, [], "numbers", [1], {}])
def test_what_is_no_task_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="tasks="):
        Pipeline(given)


@pytest.mark.parametrize("given", [[1], "concurrency", 5])
def test_options_of_another_kind_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="options="):
        Pipeline(task(), given)
