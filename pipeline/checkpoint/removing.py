"""Removing the folders of generations."""

from __future__ import annotations

import os

from pipeline.store.files import FilesLike

PART = ".part"
"""What the folder of a generation is called that does not exist yet, or no more, after its number."""


def remove_generation(files: FilesLike, folder: str) -> None:
    """Remove the folder of a generation; an absent one is no error.

    It is set aside before anything in it is removed: a crash must not leave a folder without a manifest under a
    generation's name, of which nobody could tell whether it was damaged.
    """
    if not os.path.lexists(folder):
        return
    remove_tree(files, folder + PART)  # of a save that a crash cut off before another one had the number
    files.rename(folder, folder + PART)
    files.sync_directory(os.path.dirname(folder))
    remove_tree(files, folder + PART)


def remove_tree(files: FilesLike, path: str) -> None:
    """Remove a folder and all in it; an absent one is no error."""
    if not os.path.lexists(path):
        return
    if os.path.islink(path) or not os.path.isdir(path):  # what a link leads to belongs to somebody else
        files.unlink(path)
        return
    for folder, folders, names in os.walk(path, topdown=False):
        for name in names:
            files.unlink(os.path.join(folder, name))
        for name in folders:
            full = os.path.join(folder, name)
            if os.path.islink(full):
                files.unlink(full)
            else:
                files.rmdir(full)
    files.rmdir(path)
