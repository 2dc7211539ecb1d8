"""Starts a training in a process of its own, and kills it on the way: what the learners in this folder share."""

import random
import signal
import subprocess
import sys


def supervise(script, seed, kills, between, *more):
    """Run ``script`` in processes that are killed (SIGKILL) after a random number of steps each.

    Args:
        script: takes ``--seed``, and ``--die-after``, 0 for never.
        seed: of the training, and of the moments.
        kills: how often it is killed; then it may end.
        between: from how many steps to how many others a life has, (least, most + 1).
        more: arguments of the script.

    Returns:
        The exit code of the last process.
    """
    moments = random.Random(seed)
    code = 1
    for life in range(kills + 1):
        die_after = 0 if life == kills else moments.randrange(*between)
        command = [sys.executable, script, "--seed", str(seed), "--die-after", str(die_after), *more]
        code = subprocess.run(command).returncode
        if code != -signal.SIGKILL:
            break
        print("  killed", flush=True)
    return code
