"""Sockets that no forked child may keep: it would hold a connection, or a port, when its parent was killed."""

from __future__ import annotations

import os
import socket
import weakref

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_hooked: list[bool] = []


def not_for_children(raw: socket.socket) -> None:
    """Let no forked child keep a socket."""
    _sockets.add(raw)
    if not _hooked:
        _hooked.append(True)
        os.register_at_fork(after_in_child=_close_inherited)


def _close_inherited() -> None:
    for raw in list(_sockets):
        raw.close()
