"""Where a run is served: its folder says who holds it, and so at which address."""

from __future__ import annotations

import os
import socket
import sys
from typing import NamedTuple

from pipeline.errors import NotServed, ServingError
from pipeline.serve.server import ADDRESS, address_of
from pipeline.store.layout import Layout
from pipeline.store.lock import look

FAR = "ray://"
"""What an address begins with that is the name of an actor of Ray."""


class Place(NamedTuple):
    """Where to connect: the address, the run that must be there (empty: any), and what to say if nobody is."""

    address: str
    run_id: str
    absent: str

    @property
    def far(self) -> bool:
        """Whether it may be on another machine."""
        return self.address.startswith(FAR)


def find(run: str, *, far: bool = False) -> Place:
    """Return where a run is served; ``far``: over Ray. Blocks.

    Raises:
        NotServed: the folder holds no run, or is held on another machine.
        ServingError: the system has no such sockets.
    """
    if run.startswith(FAR):
        return Place(
            run,
            "",
            f"{run}: no actor of that name is in the cluster: the run's process has ended, or has not "
            "called serve(via='ray')",
        )
    if not sys.platform.startswith("linux"):
        raise ServingError(f"connect() needs sockets and memory without a name; {sys.platform} has none, use Linux")
    if run.startswith(ADDRESS):
        return Place(run, "", f"{run}: nobody listens there; the process that served it has ended, or is elsewhere")
    layout = Layout(run)
    found = layout.read_run() if os.path.isdir(run) else None
    if found is None:
        raise NotServed(f"{run}: there is no run; start the process that holds the pipeline and serves it first")
    try:
        holder = look(layout.lock_file).holder
    except OSError as error:
        raise NotServed(f"{layout.lock_file}: says who holds the run, and cannot be read: {error}") from error
    address = address_of(found.run_id, holder.incarnation)
    if far:
        absent = f"{run}: process {holder.process} on host {holder.host} held it last, and does not serve it over Ray"
        return Place(FAR + address[1:], found.run_id, absent)
    here = socket.gethostname()
    if holder.host and holder.host != here:
        raise NotServed(
            f"{run}: process {holder.process} on host {holder.host} holds it, and this is {here}: serve() is for the "
            "processes of one machine; serve(via='ray') and connect(run, via='ray') reach further"
        )
    absent = (
        f"{run}: process {holder.process} held it last, as incarnation {holder.incarnation}, and does not serve it: it "
        "has ended, or has not called serve()"
    )
    return Place(address, found.run_id, absent)
