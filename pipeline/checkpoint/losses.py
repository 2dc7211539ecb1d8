"""What a salvage tells: what is not whole in a run's folder, and what became of the rest."""

from __future__ import annotations

import msgspec


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """One place of the damaged run that is not as it should be, and what that costs the new one."""

    path: str
    """The file or folder, relative to the damaged run's folder."""
    offset: int | None = None
    """Where in the file, in bytes; None: the whole file, or not known."""
    bytes: int = 0
    """How many bytes from there on could not be used; 0: not known."""
    what: str
    """What is wrong there."""
    lost: str
    """What the new run is without, in words."""


class Salvaged(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`~pipeline.checkpoint.salvage` wrote, and what it could not."""

    directory: str
    """The new run's folder."""
    run_id: str
    """The new run's."""
    origin: str
    """Run id and generation that it was made from: ``"<run id>/<generation>"``."""
    step: int
    """Of that generation: the last step that the weights include."""
    losses: list[Loss]
    """Everything that is not whole; empty for a run that is."""
    groups_kept: int
    """Finished groups that came along with every payload."""
    members_kept: int
    """Payloads of finished members that came along."""
    members_again: int
    """Members that had ended, or whose end is not known, and are run again."""
    items_again: int
    """Items of which nothing but their place in the source is known, and that are run from the start."""
    generations_usable: int
    """Generations of the damaged run whose consumer half is whole."""
    generations_unusable: int
    left_out: dict[str, str] = {}
    """Files of the generation that are not whole and did not come along, and why: a resume does not have them."""
    ranks: list[int] = []
    """Finished groups of each rank; empty for the pipeline of one process."""
    ranks_lost: list[int] = []
    """Ranks of which nothing says what the weights have seen, and which begin without any group."""

    @property
    def whole(self) -> bool:
        """Whether nothing was lost: the new run is a copy."""
        return not self.losses
