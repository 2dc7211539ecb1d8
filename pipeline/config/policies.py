"""Policies: small frozen objects that say what is done about failures, staleness and groups that teach nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from pipeline.config.base import Options
from pipeline.errors import ConfigError


class Retry(Options, frozen=True, kw_only=False, tag="retry", tag_field="policy"):
    """Try a failing member again, up to ``attempts`` tries in all; then it failed for good."""

    attempts: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("attempts", 1)


class FailFast(Options, frozen=True, tag="fail_fast", tag_field="policy"):
    """The first failure stops the run: ``get_batch`` raises it."""


class Skip(Options, frozen=True, tag="skip", tag_field="policy"):
    """A failing member is settled at once as failed; the run goes on."""


class ZeroVariance(Options, frozen=True, tag="zero_variance", tag_field="filter"):
    """A filter: rejects groups whose rewards are all equal, to within ``tolerance``; they teach a group-relative
    advantage nothing. A group of one rollout is kept."""

    tolerance: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("tolerance", 0)

    def __call__(self, rewards: Sequence[float]) -> bool:
        """Whether a group with these rewards is kept."""
        return len(rewards) < 2 or max(rewards) - min(rewards) > self.tolerance


FailurePolicy: TypeAlias = Retry | FailFast | Skip


def failure_policy(given: FailurePolicy | Mapping[str, Any] | str) -> FailurePolicy:
    """Return the policy that ``given`` describes: an object, ``"skip"``, or ``{"policy": "retry", ...}``.

    Raises:
        ConfigError: no such policy.
    """
    if isinstance(given, (Retry, FailFast, Skip)):
        return given
    plain: Any = {"policy": given} if isinstance(given, str) else given
    try:
        policy: FailurePolicy = msgspec.convert(plain, FailurePolicy)
        return policy
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        allowed = "Retry(attempts=n), FailFast() or Skip(), or a dict with policy: retry, fail_fast or skip"
        raise ConfigError.of("on_failure", given, f"{allowed} ({error})") from None


class Reroll(Options, frozen=True, kw_only=False, tag="reroll", tag_field="policy"):
    """Run again what has become too old, and keep what has not.

    ``tail=1``: at once, and of a group only the members that are too old. ``tail=n``: whole groups, when n of them have
    gathered (or the sources are at their end); until then they are in nobody's way, not even in that of ``capacity``.
    """

    tail: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("tail", 1)


StalenessPolicy: TypeAlias = Literal["gate", "wait", "drop", "reroll", "mask"] | Reroll


def staleness_policy(given: StalenessPolicy | Mapping[str, Any]) -> StalenessPolicy:
    """Return the policy that ``given`` describes: a name, a :class:`Reroll`, or ``{"policy": "reroll", "tail": n}``.

    Raises:
        ConfigError: no such policy.
    """
    try:
        policy: StalenessPolicy = msgspec.convert(given, StalenessPolicy)
        return policy
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise ConfigError.of("staleness_policy", given, str(error.__cause__)) from None
        allowed = "'gate', 'wait', 'drop', 'reroll', 'mask', Reroll(tail=n), or a dict with policy: reroll, is needed"
        raise ConfigError.of("staleness_policy", given, allowed) from None
