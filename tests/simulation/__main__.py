"""``python -m tests.simulation --seeds 10000``: a line for each failure, with the seed to play it again."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.play import simulate


def play(seed: int) -> tuple[int, str, int]:
    """Return the seed, what went wrong (or nothing), and the batches trained."""
    logging.disable(logging.CRITICAL)
    try:
        return seed, "", simulate(seed)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return seed, f"{type(error).__name__}: {error}".splitlines()[0], 0


def main() -> int:
    """Play one seed with its traceback, or many."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="one seed, with the traceback of what goes wrong")
    parser.add_argument("--seeds", type=int, default=300, help="how many")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first of them")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if given.seed is not None:
        try:
            print(f"seed {given.seed}: {simulate(given.seed)} batches")
            return 0
        except Exception:
            traceback.print_exc()
            return 1
    began, batches, failed = time.monotonic(), 0, 0
    with ProcessPoolExecutor(given.jobs) as pool:
        for seed, wrong, count in pool.map(play, range(given.first, given.first + given.seeds), chunksize=8):
            batches += count
            if wrong:
                failed += 1
                print(f"seed {seed}: {wrong}", flush=True)
    seconds = time.monotonic() - began
    print(f"{given.seeds} seeds, {failed} failed, {batches} batches trained, {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
