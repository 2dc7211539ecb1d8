"""Folders that are written beside their place, and get their name when they are whole: a kill leaves nothing there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator

from pipeline.errors import ConfigError, Locked, WriteFailed
from pipeline.store.files import OsFiles
from pipeline.tools.interchange.new_run import is_empty

SUFFIX = ".forebay-part"
_OWN = ".forebay-scratch"


def check_target(target: str, *sources: str) -> None:
    """Refuse a place that holds something, or lies inside what is read.

    Raises:
        ConfigError: it is such.
    """
    real = os.path.realpath(target)
    for source in map(os.path.realpath, sources):
        if os.path.isdir(source) and os.path.commonpath([source, real]) == source:
            raise ConfigError.of("out", target, f"must not lie in {source}, which is read")
    if not is_empty(target):
        raise ConfigError.of("out", target, "must be absent or an empty folder; choose another, or remove it")


@contextlib.contextmanager
def aside(target: str) -> Iterator[str]:
    """Yield a folder beside ``target``, which becomes it where the body ends well, and is removed where it does not.

    What a killed process had left there is removed first.

    Raises:
        Locked: another process writes it now.
        WriteFailed: it cannot be written.
    """
    target = os.path.abspath(target)
    scratch = target + SUFFIX
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        lock = _begun(scratch)
    except OSError as error:
        if isinstance(error, Locked):
            raise
        raise WriteFailed(f"{scratch}: cannot be made: {error}") from error
    try:
        yield os.path.join(scratch, "whole")
        _finish(scratch, target)
    except OSError as error:
        if isinstance(error, (Locked, WriteFailed)) or type(error).__module__.startswith("pipeline."):
            raise
        raise WriteFailed(
            f"{target}: could not be written: {error}. Nothing of it stays; free space, and retry"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def _begun(scratch: str) -> int:
    os.makedirs(scratch, exist_ok=True)
    own = os.path.join(scratch, _OWN)
    if not os.path.lexists(own) and os.listdir(scratch):
        raise ConfigError.of("out", scratch, "this folder is needed for what is being written; move it away")
    lock = os.open(own, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise Locked(f"{scratch}: another process is writing it; wait for it, or choose another folder") from error
    whole = os.path.join(scratch, "whole")
    shutil.rmtree(whole, ignore_errors=True)
    os.makedirs(whole)
    return lock


def _finish(scratch: str, target: str) -> None:
    """Sync all folders, and give the whole its name."""
    whole, files = os.path.join(scratch, "whole"), OsFiles()
    for folder, _, _ in os.walk(whole, topdown=False):
        files.sync_directory(folder)
    if os.path.isdir(target):
        os.rmdir(target)
    files.rename(whole, target)
    files.sync_directory(os.path.dirname(target))
