"""How a batch is divided among tasks, and in which order their items are drawn for that: pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction


def divide(total: int, shares: Mapping[str, float], most: Mapping[str, int]) -> dict[str, int]:
    """Divide ``total`` places by shares, to the largest remainder (Hamilton 1792).

    Each gets its share rounded down; places that are left go to the largest fractions, ties by order. A task that has
    fewer to give than it gets gives those, and the other places are divided anew among the rest.

    Args:
        total: how many places there are.
        shares: by task, each above 0.
        most: what a task can give at most, where that is known.

    Returns:
        Places by task, in the order of ``shares``. Together ``total``, unless every task is in ``most``.
    """
    places = dict.fromkeys(shares, 0)
    names = list(shares)
    while names and total > 0:
        given = _largest_remainder(total, {name: shares[name] for name in names})
        short = [name for name in names if name in most and most[name] < given[name]]
        if not short:
            places |= given
            break
        for name in short:
            places[name] = most[name]
            total -= most[name]
        names = [name for name in names if name not in short]
    return places


def _largest_remainder(total: int, shares: Mapping[str, float]) -> dict[str, int]:
    # Exactly, and as people write them: of 0.1, 0.2 and 0.7, a tenth of 5 and seven tenths of 5 are both and a half.
    exact = {name: Fraction(repr(share)) for name, share in shares.items()}
    whole = sum(exact.values())
    quotas = {name: total * share / whole for name, share in exact.items()}
    places = {name: int(quota) for name, quota in quotas.items()}
    order = sorted(shares, key=lambda name: places[name] - quotas[name])  # stable: ties by order
    for name in order[: total - sum(places.values())]:
        places[name] += 1
    return places


def due(candidates: Iterable[str], places: Mapping[str, int], drawn: Mapping[str, int]) -> str | None:
    """Return which of ``candidates`` is drawn next, so that draws come in the batches in which they are used.

    That is the one whose next draw belongs to the earliest batch; inside a batch draws are spread evenly, ties by
    order. It hangs on counts alone, so a resumed run draws on as it would have.
    """
    best, least = None, (0, 0.0)
    for name in candidates:
        size = places[name]
        batch, inside = divmod(drawn.get(name, 0), size)
        key = (batch, (inside + 1) / size)
        if best is None or key < least:
            best, least = name, key
    return best
