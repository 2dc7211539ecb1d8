"""Random changes of bytes, for where no coverage-guided fuzzer is installed."""

from __future__ import annotations

import random
from collections.abc import Sequence

_NUMBERS = [0, 1, 0x7F, 0x80, 0xC1, 0xDC, 0xDD, 0xDF, 0xFF, ord("["), ord("{"), ord('"'), ord("-"), ord("9")]
_MOST = 1 << 16


def mutated(rng: random.Random, pool: Sequence[bytes]) -> bytes:
    """A few random changes of one of ``pool``."""
    raw = bytearray(rng.choice(pool))
    for _ in range(1 + int(rng.expovariate(0.5))):
        place = rng.randrange(len(raw) + 1)
        end = min(len(raw), place + 1 + int(rng.expovariate(0.1)))
        way = rng.randrange(7)
        if way == 0 and place < len(raw):
            raw[place] ^= 1 << rng.randrange(8)
        elif way == 1 and place < len(raw):
            raw[place] = rng.choice(_NUMBERS)
        elif way == 2:
            del raw[place:end]
        elif way == 3:
            raw[place:place] = raw[place:end] * rng.choice((1, 2, 100))
        elif way == 4:
            raw[place:place] = rng.randbytes(rng.choice((1, 4, 8)))
        elif way == 5:
            other = rng.choice(pool)
            raw[place:] = other[rng.randrange(len(other) + 1) :]
        elif way == 6 and place + 8 <= len(raw):
            width = rng.choice((2, 4, 8))
            number = rng.choice((0, 1, 2 ** (8 * width - 1), 2 ** (8 * width) - 1))
            raw[place : place + width] = number.to_bytes(width, rng.choice(("little", "big")))
        del raw[_MOST:]
    return bytes(raw)
