"""Fuzz the readers: ``python -m tests.fuzz --seconds 60 [--plain] [--target NAME] [--seed N]``.

Guided by coverage where ``atheris`` is installed, and by chance alone where it is not or with ``--plain``. Ends with
the first finding: its bytes are left in a file, and it is raised.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MEMORY = 512 << 20


def main() -> None:
    """Run until the time is up."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", default="", help="this one alone")
    parser.add_argument("--plain", action="store_true", help="by chance, even where atheris is installed")
    given = parser.parse_args()
    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        atheris = None if given.plain else _atheris()
        if atheris is None:
            _by_chance(folder, given)
        else:
            _guided(atheris, folder, given)


def _atheris() -> Any:
    try:
        return importlib.import_module("atheris")
    except ImportError:
        return None


def _by_chance(folder: str, given: argparse.Namespace) -> None:
    from tests.fuzz.mutations import mutated
    from tests.fuzz.targets import Targets
    from tests.support.opening import little_memory

    targets, rng, counts = Targets(folder), random.Random(given.seed), Counter[str]()
    names, seeds = _names(targets.all, given.target), targets.seeds()
    end = time.monotonic() + given.seconds
    with little_memory(MEMORY):
        while time.monotonic() < end:
            name = names[sum(counts.values()) % len(names)]
            data = mutated(rng, seeds[name])
            try:
                targets.all[name](data)
            except BaseException:
                Path("finding").write_bytes(data)
                print(f"seed {given.seed}, target {name!r}: see the file `finding`", file=sys.stderr)
                raise
            counts[name] += 1
    print(f"by chance, seed {given.seed}: {sum(counts.values())} executions, nothing found: {dict(counts)}")


def _guided(atheris: Any, folder: str, given: argparse.Namespace) -> None:
    with atheris.instrument_imports(include=["pipeline.store", "pipeline.checkpoint", "pipeline.wiring.lines"]):
        from tests.fuzz.targets import Targets
    targets = Targets(folder)
    names, corpus = _names(targets.all, given.target), os.path.join(folder, "corpus")
    os.makedirs(corpus)
    for name, seeds in targets.seeds().items():
        for number, seed in enumerate(seeds):
            if name in names:
                first = bytes([names.index(name)])
                Path(corpus, f"{names.index(name)}-{number}").write_bytes(first + seed)

    def one(data: bytes) -> None:
        if data:
            targets.all[names[data[0] % len(names)]](data[1:])

    how = [f"-max_total_time={given.seconds:.0f}", f"-seed={given.seed or 1}", "-max_len=8192", "-rss_limit_mb=4096"]
    atheris.Setup([sys.argv[0], *how, "-malloc_limit_mb=512", "-timeout=10", "-verbosity=1", corpus], one)
    atheris.Fuzz()


def _names(names: Any, wanted: str) -> Sequence[str]:
    return [wanted] if wanted else sorted(names)


if __name__ == "__main__":
    main()
