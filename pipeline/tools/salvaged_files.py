"""What the trainer had attached to a damaged buffer, and what of it comes along in a salvage."""

from __future__ import annotations

import os

from pipeline.checkpoint.manifest import OWN_FOLDER, FileInfo, ShardInfo
from pipeline.replay.salvage_choice import Chosen, of_trainer, salvage_notes


class Attached:
    """What is attached for all ranks comes along file by file; what ranks had for themselves as a whole, or not."""

    def __init__(self, chosen: Chosen) -> None:
        self._chosen, self._stored = chosen, chosen.stored
        self._own_goes = not any(f"/{OWN_FOLDER}/" in path for path in chosen.left_out)

    def files(self) -> list[tuple[str, FileInfo]]:
        """Return the files that come along, and where they lie."""
        listed = [info for info in self._stored.manifest.files if of_trainer(info.path)]
        listed = [info for info in listed if self._own_goes or f"/{OWN_FOLDER}/" not in info.path]
        listed = [info for info in listed if info.path not in self._chosen.left_out]
        return [(os.path.join(self._stored.folder, info.path), info) for info in listed]

    def names(self) -> list[str]:
        """Return what was attached for all, and comes along."""
        gone = {os.path.splitext(os.path.basename(path))[0] for path in self._chosen.left_out}
        return [name for name in self._stored.manifest.attached if name not in gone]

    def own(self, shard: ShardInfo) -> list[str]:
        """Return what a rank had attached for itself, and comes along."""
        return shard.own if self._own_goes else []

    def left_out(self) -> dict[str, str]:
        """Return what the new generation says that it leaves out."""
        manifest, notes = self._stored.manifest, salvage_notes(self._chosen)
        if not self._own_goes:
            why = "what a rank had attached for itself, and that of another one is damaged"
            own = {name for each in manifest.shards for name in each.own}
            notes |= {f"{OWN_FOLDER}/{name}.safetensors": why for name in sorted(own)}
        return {**manifest.left_out, **notes}
