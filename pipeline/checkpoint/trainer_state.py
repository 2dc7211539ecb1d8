"""State of what was attached (model, optimizer, ...) to a file and back, without pickle.

The file is a valid ``safetensors`` file. Its tensors are numbered; ``__tree__`` is MessagePack in a uint8 tensor and
holds the nesting, the keys and every plain value, with references to the tensors. A tensor that stands in several
places is stored once and comes back shared. Tensors are written one after the other, so that nothing but the largest
is ever copied, and read back into one piece of memory that they share.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from pipeline.errors import ConfigError, Damaged, StoreError, UsageError
from pipeline.interfaces import Stateful
from pipeline.store.blocks import crc32c_more, crc32c_of_file
from pipeline.store.codec import TensorBytes, read_blob, tensor_bytes
from pipeline.store.files import FilesLike, open_plain, plain_handle, size_of
from pipeline.store.memory import available_memory
from pipeline.store.plain import MARK, PlainValueError, from_plain, to_plain

TREE_KEY = "__tree__"
_ATTACHED_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")  # with its suffix, the name of a file
_CHUNK = 4 << 20  # the checksum of a chunk holds the interpreter's lock, and leaves it in the cache


def check_attachable(objects: Mapping[str, Any]) -> None:
    """Compare what is to be attached with what can be.

    Raises:
        ConfigError: a name cannot be that of a file, or an object has no state.
    """
    for name, each in objects.items():
        if not _ATTACHED_NAME.fullmatch(name):
            raise ConfigError.of("attach", name, "names are letters, digits, '_', '-' and '.', up to 200 of them")
        if not isinstance(each, Stateful):
            raise ConfigError(
                f"attach({name}=...): {type(each).__name__} has no state_dict() and load_state_dict()", option=name
            )


def load_states(objects: Mapping[str, Stateful], states: Mapping[str, Any]) -> None:
    """Load each object's state in place. Should one refuse it, those before it stay loaded, and a note on its error
    says so: what they held is gone, as keeping it would take the trainer's memory once more at every resume."""
    loaded: list[str] = []
    for name, each in objects.items():
        try:
            each.load_state_dict(states[name])
        except Exception as error:
            others = f"; {', '.join(loaded)} held it already, and still do" if loaded else ""
            error.add_note(
                f"attached {name!r} did not take the checkpoint's state, and may hold a part of it{others}. The run is "
                "as it was: resume() may be called again"
            )
            raise
        loaded.append(name)


class CapturedState:
    """One attached object's state, as ``state_dict`` gave it: references to tensors and a copy of the rest.

    Writing reads the tensors, so they must not change before :meth:`write` has returned.
    """

    def __init__(self, name: str, state: Any) -> None:
        """Capture ``state``.

        Raises:
            UsageError: a value in it cannot be stored; the message says where it stands.
        """
        self.name = name
        self._tensors: list[Any] = []
        self._places: dict[tuple[Any, ...], int] = {}
        try:
            self._tree = msgspec.msgpack.encode(to_plain(state, leaf=self._leaf))
        except PlainValueError as error:
            raise UsageError(f"attached {name!r}: {error}") from None

    def _leaf(self, value: Any, path: str) -> Any:
        if isinstance(value, tuple):
            return {MARK: ["Size", list(value)]} if isinstance(value, torch.Size) else None
        if isinstance(value, (torch.Tensor, np.ndarray)):
            if hasattr(value, "device_mesh"):
                raise PlainValueError(f"a DTensor at {path}; write it inside `async with pipe.checkpoint(step)`")
            try:
                _describe(value)
            except (TypeError, RuntimeError) as error:
                raise PlainValueError(f"{error} (at {path})") from None
            return {MARK: ["tensor" if isinstance(value, torch.Tensor) else "array", self._number(value)]}
        if isinstance(value, (torch.dtype, torch.device)):
            return {MARK: [type(value).__name__, str(value)]}
        raise PlainValueError(
            f"a {type(value).__name__} at {path} cannot be stored without pickle; state_dict() must give tensors, "
            "arrays, None, bool, int, float, str, bytes, and lists, tuples and dicts of them"
        )

    def _number(self, value: Any) -> int:
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta:
            key: tuple[Any, ...] = (id(value),)
            if value.numel():
                # The same bytes may be read in two ways: a conjugate is a view with a bit set.
                view = (tuple(value.shape), tuple(value.stride()), value.is_conj(), value.is_neg())
                key = (value.data_ptr(), value.dtype, str(value.device), *view)
        else:
            key = (id(value),)
        if key not in self._places:
            self._places[key] = len(self._tensors)
            self._tensors.append(value)
        return self._places[key]

    def write(self, files: FilesLike, path: str, *, to_sync: Callable[[int], None] | None = None) -> tuple[int, str]:
        """Write the file and sync it. Blocks: call it where blocking is allowed.

        Args:
            files: the file layer.
            path: a file that is not there yet.
            to_sync: takes over the open file, to sync and close it: the trainer need not wait for that.

        Returns:
            Its size in bytes, and its crc32c as eight hexadecimal digits.
        """
        checksum = 0
        handle = files.create(path)
        size = 0
        try:
            for chunk in self._chunks():
                checksum = crc32c_more(checksum, chunk)
                size += files.write(handle, [chunk])
            if to_sync is None:
                files.sync(handle)
        except BaseException:
            files.close(handle)
            raise
        if to_sync is None:
            files.close(handle)
        else:
            to_sync(handle)
        return size, f"{checksum:08x}"

    def encoded(self) -> bytes:
        """Return the content of the file, for a small one."""
        return b"".join(self._chunks())

    def _chunks(self) -> Iterator[memoryview]:
        header: dict[str, Any] = {}
        offset = 0
        # Wide types first, so that each tensor is aligned to its own item size without gaps.
        sizes = [(number, _describe(value)) for number, value in enumerate(self._tensors)]
        sizes.sort(key=lambda each: -each[1][2])
        for number, (dtype, shape, itemsize) in sizes:
            end = offset + itemsize * int(np.prod(shape, dtype=np.int64))
            header[str(number)] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
            offset = end
        end = offset + len(self._tree)
        header[TREE_KEY] = {"dtype": "U8", "shape": [len(self._tree)], "data_offsets": [offset, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % 64)
        yield memoryview(len(text).to_bytes(8, "little") + text)
        for number, _ in sizes:
            array = tensor_bytes(self._tensors[number]).array.reshape(-1).view(np.uint8)
            for start in range(0, len(array), _CHUNK):
                yield memoryview(array[start : start + _CHUNK])  # type: ignore[arg-type]
        yield memoryview(self._tree)


def _describe(value: Any) -> tuple[str, list[int], int]:
    """Dtype name, shape and item size of a tensor, at the cost of none of its data."""
    empty = value.new_empty(0) if isinstance(value, torch.Tensor) else np.empty(0, value.dtype)
    described: TensorBytes = tensor_bytes(empty)
    return described.dtype, list(value.shape), described.itemsize


def read_state(path: str, *, size: int, checksum: str) -> Any:
    """Return the state in a file. Blocks.

    Raises:
        Damaged: the file is missing, or not what the manifest says, or no such file.
    """
    read = _mapped_checked if size > available_memory() // 2 else _read_checked
    tensors = read_blob(read(path, size=size, checksum=checksum), path, copy=False) if size else {}
    tree = tensors.pop(TREE_KEY, None)
    if tree is None:
        raise Damaged(f"{path}: holds no {TREE_KEY!r}, so it is no trainer state")

    def leaf(kind: str, content: Any) -> Any:
        if kind == "tensor":
            return tensors[str(content)]
        if kind == "array":
            return tensors[str(content)].numpy()
        if kind == "Size":
            return torch.Size(content)
        if kind == "device":
            return torch.device(content)
        if kind == "dtype":
            return _dtype(content)
        raise PlainValueError(f"unknown kind {kind!r}")

    try:
        return from_plain(msgspec.msgpack.decode(tree.numpy().tobytes()), leaf=leaf)
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise Damaged(f"{path}: the state in it is damaged ({error})") from None


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."))
    if not isinstance(found, torch.dtype):  # the name is data: it must not reach anything else of that module
        raise PlainValueError(f"{name!r} is no dtype")
    return found


def _read_checked(path: str, *, size: int, checksum: str) -> memoryview:
    """Return what is in a file, compared with its line in a manifest as it comes: it is read once."""
    _check_size(path, size)
    view = memoryview(np.empty(size, np.uint8).data)  # not cleared first, as a bytearray would be
    actual = end = 0
    handle = plain_handle(path)
    try:
        while count := os.preadv(handle, [view[end : end + _CHUNK]], end):
            actual = crc32c_more(actual, view[end : end + count])
            end += count
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error}") from error
    finally:
        os.close(handle)
    if f"{actual:08x}" != checksum:
        raise _changed(path, f"{actual:08x}", checksum)
    return view


def _mapped_checked(path: str, *, size: int, checksum: str) -> memoryview:
    """As :func:`_read_checked`, for what memory may not hold beside the live state: a private map, whose pages come
    when they are looked at and may go again. It is read twice for that."""
    check_file(path, size=size, checksum=checksum)
    handle = plain_handle(path)
    try:
        return memoryview(mmap.mmap(handle, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    finally:
        os.close(handle)


def check_file(path: str, *, size: int, checksum: str | None, told: Callable[[int], None] | None = None) -> None:
    """Compare a file with its line in a manifest; its size alone if ``checksum`` is None. ``told`` is told of the bytes
    that were read. Blocks.

    Raises:
        Damaged: it is missing, of another length, or its bytes changed.
    """
    _check_size(path, size)
    if checksum is None:
        return
    _, actual = crc32c_of_file(path, told)
    if actual != checksum:
        raise _changed(path, actual, checksum)


def _check_size(path: str, size: int) -> None:
    try:
        with open_plain(path) as file:
            found = size_of(file.fileno(), path)
    except FileNotFoundError:
        raise Damaged(f"{path}: missing, though the generation's manifest lists it ({size} bytes)") from None
    if found != size:
        cut = found if found < size else None
        raise Damaged(f"{path}: {found} bytes long, {size} expected; the file was cut or changed", offset=cut)


def _changed(path: str, actual: str, checksum: str) -> Damaged:
    return Damaged(f"{path}: crc32c {actual}, {checksum} expected; the file was changed")
