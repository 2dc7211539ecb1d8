"""Small generations, committed as the pipeline commits them."""

from __future__ import annotations

import os
from typing import Any

import torch

from pipeline.checkpoint.generations import GenerationWriter, Stored, find_generations
from pipeline.checkpoint.manifest import FileInfo, Manifest
from pipeline.checkpoint.retire import Kept, retire
from pipeline.checkpoint.trainer_state import CapturedState, read_state
from pipeline.store.files import FilesLike
from pipeline.store.layout import Layout, RunFile
from tests.support.disk import ScriptedFiles


def commit(
    layout: Layout,
    run: RunFile,
    number: int,
    step: int,
    *,
    files: FilesLike | None = None,
    link: Stored | None = None,
    keep: int | None = None,
    state: dict[str, Any] | None = None,
) -> Stored:
    """Commit generation ``number`` with a trainer file and two small files that all say ``step``."""
    files = files or ScriptedFiles()
    writer = GenerationWriter(layout, files, number)
    try:
        stored = _commit(run, writer, files, step, link, state)
    except BaseException:  # of a process that is killed the kernel closes the files
        for handle in writer._unsynced:
            os.close(handle)
        raise
    if keep is not None:
        retire(layout, files, find_generations(layout, run.run_id).complete, Kept(keep))
    return stored


def _commit(
    run: RunFile,
    writer: GenerationWriter,
    files: FilesLike,
    step: int,
    link: Stored | None,
    state: dict[str, Any] | None,
) -> Stored:
    writer.begin()
    if link is not None:
        info = next(info for info in link.manifest.files if info.path == "trainer/model.safetensors")
        writer.link(info.path, os.path.join(link.folder, info.path), info)
    else:
        path = "trainer/model.safetensors"
        files.makedirs(os.path.join(writer.folder, "trainer"))
        captured = CapturedState("model", state or {"weight": torch.full((300,), step)})
        size, checksum = captured.write(files, os.path.join(writer.folder, path), to_sync=writer.sync_later)
        writer.infos.append(FileInfo(path=path, bytes=size, crc32c=checksum))
    writer.add("consumer.json", b'{"step": %d}' % step)
    writer.add("files/deep/er.txt", b"step %d" % step)
    return writer.commit(
        Manifest(
            run_id=run.run_id, generation=writer.number, step=step, files=sorted(writer.infos, key=lambda i: i.path)
        )
    )


def says(stored: Stored) -> tuple[int, int, str, str]:
    """What step each part of a generation says: manifest, tensors, and the two files."""
    info = next(info for info in stored.manifest.files if info.path == "trainer/model.safetensors")
    path = os.path.join(stored.folder, info.path)
    weight = read_state(path, size=info.bytes, checksum=info.crc32c)["weight"]
    (value,) = set(weight.tolist())
    texts = []
    for name in ("consumer.json", "files/deep/er.txt"):
        with open(os.path.join(stored.folder, name)) as file:
            texts.append(file.read())
    return stored.manifest.step, value, texts[0], texts[1]


def whole(step: int) -> tuple[int, int, str, str]:
    """What :func:`says` returns for a generation of ``step`` that is no mix."""
    return step, step, f'{{"step": {step}}}', f"step {step}"
