"""A file without a name, of which parts are read again: for what has to wait and is more than memory."""

from __future__ import annotations

import os

from pipeline.errors import StoreError, WriteFailed
from pipeline.store.scratch import unnamed


class Nameless:
    """Bytes that wait in a folder; gone with the process, however it ends. Blocks."""

    _handle = -1  # while it is not open

    def __init__(self, folder: str) -> None:
        """Raises:
        WriteFailed: there can be no such file.
        """
        self._folder, self._end = folder, 0
        try:
            self._handle = unnamed(folder)
        except OSError as error:
            raise WriteFailed(f"{folder}: no file for what has to wait can be made there: {error}") from error

    def append(self, raw: memoryview) -> int:
        """Add bytes, and return where they begin.

        Raises:
            WriteFailed: they cannot be written.
        """
        begin = self._end
        self.put(raw, begin)
        self._end = begin + len(raw)
        return begin

    def put(self, raw: memoryview, begin: int) -> None:
        """Write bytes where they belong.

        Raises:
            WriteFailed: they cannot be written.
        """
        try:
            while raw:
                written = os.pwrite(self._handle, raw, begin)
                raw, begin = raw[written:], begin + written
        except OSError as error:
            raise WriteFailed(f"{self._folder}: what has to wait could not be written: {error}") from error

    def read(self, begin: int, count: int) -> bytes:
        """Return bytes that were written.

        Raises:
            StoreError: they cannot be read.
        """
        found = b""
        try:
            while len(found) < count and (more := os.pread(self._handle, count - len(found), begin + len(found))):
                found = found + more if found else more
        except OSError as error:
            raise StoreError(f"{self._folder}: what had to wait cannot be read: {error}") from error
        if len(found) < count:
            raise StoreError(f"{self._folder}: of what had to wait {count - len(found)} bytes are gone")
        return found

    def close(self) -> None:
        """Let the file go."""
        if self._handle >= 0:
            handle, self._handle = self._handle, -1
            os.close(handle)

    __del__ = close
