"""Rollouts to bytes and back: each payload is a valid ``safetensors`` blob.

The tensors are named ``<trace>.<name>``; one more, ``__item__``, is MessagePack (:class:`PayloadHeader`) in
a uint8 tensor and holds everything that is no tensor. Anybody can cut a blob out of a segment and open it
with ``safetensors``. The header is written here rather than by that package's Python side, which takes
30 to 220 us a blob, and the blob is the one copy that is made of what a runner returned: the same bytes are
held in memory and written to the disk.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from pipeline.errors import Damaged, RolloutInvalid, RolloutTooDeep
from pipeline.records import Item, Rollout, Trace
from pipeline.store.plain import PlainValueError, TooDeepError, from_plain, to_plain

ITEM_KEY = "__item__"
_ALIGN = 64

_TORCH_TO_NAME: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_NAME_TO_TORCH = {name: dtype for dtype, name in _TORCH_TO_NAME.items()}
_NUMPY_TO_NAME: dict[np.dtype[Any], str] = {
    np.dtype("<f8"): "F64",
    np.dtype("<i8"): "I64",
    np.dtype("<u8"): "U64",
    np.dtype("<c8"): "C64",
    np.dtype("<f4"): "F32",
    np.dtype("<i4"): "I32",
    np.dtype("<u4"): "U32",
    np.dtype("<f2"): "F16",
    np.dtype("<i2"): "I16",
    np.dtype("<u2"): "U16",
    np.dtype("i1"): "I8",
    np.dtype("u1"): "U8",
    np.dtype("?"): "BOOL",
}
# numpy has no such types: their bits travel as integers of the same size.
_BITS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


class PayloadHeader(msgspec.Struct, omit_defaults=True):
    """What a payload says of itself, so that a segment can be read with no journal beside it."""

    uid: int
    task: str
    epoch: int = 0
    index: int = 0
    member: int = 0
    attempt: int = 1
    life: int = 0
    reward: float = 0.0
    oldest: int = 0
    newest: int = 0
    tokens: int = 0
    traces: list[tuple[str, str]] = []
    """(agent, policy) of each trace."""
    info: dict[str, Any] = {}


class TensorBytes(msgspec.Struct, frozen=True):
    """A tensor ready to be written: its safetensors dtype, shape and contiguous little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    array: np.ndarray
    itemsize: int


_encode_header = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(PayloadHeader).decode


class _Layout(NamedTuple):
    order: list[int]
    prefix: str
    data_bytes: int
    heads: dict[int, bytes]
    """Length and JSON as they stand at the beginning of a blob, by the length of its item header."""


_layouts: dict[tuple[Any, ...], _Layout] = {}  # headers by names, dtypes and shapes; bounded below
_MOST_LAYOUTS = 512
_MOST_HEADS = 64


def dtype_name(dtype: torch.dtype) -> str:
    """Return how safetensors spells a dtype.

    Raises:
        TypeError: it does not know it.
    """
    name = _TORCH_TO_NAME.get(dtype)
    if name is None:
        raise TypeError(f"dtype {dtype} cannot be stored")
    return name


def item_bytes(name: str) -> int:
    """Return the bytes of one value of a dtype, as safetensors spells it."""
    return _NAME_TO_TORCH[name].itemsize


def tensor_bytes(value: Any) -> TensorBytes:
    """Return the bytes of a torch tensor, numpy array, number, or nested list of numbers.

    Raises:
        TypeError: the value or its dtype cannot be stored; the message says why.
    """
    if type(value) is not np.ndarray:
        if isinstance(value, torch.Tensor):
            return _torch_bytes(value)
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError("a masked array cannot be stored; store its data and its mask as two tensors")
    array = np.asarray(value)
    name = _NUMPY_TO_NAME.get(array.dtype)
    if name is None and array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
        name = _NUMPY_TO_NAME.get(array.dtype)
    if name is None:
        raise TypeError(f"dtype {array.dtype} of a {type(value).__name__} cannot be stored")
    return TensorBytes(name, array.shape, np.ascontiguousarray(array), array.itemsize)


def _torch_bytes(value: torch.Tensor) -> TensorBytes:
    name, bits = _TORCH_TO_NAME.get(value.dtype), _BITS.get(value.dtype)
    try:
        plain = value.detach() if value.requires_grad else value
        array = plain.numpy() if bits is None else plain.contiguous().view(bits).numpy()
    except (RuntimeError, TypeError):  # another device, lazily conjugated, sparse, ...
        return _unusual_torch_bytes(value)
    if name is None:
        return _unusual_torch_bytes(value)
    return TensorBytes(name, array.shape, np.ascontiguousarray(array), array.itemsize)


def _unusual_torch_bytes(value: torch.Tensor) -> TensorBytes:
    name = _TORCH_TO_NAME.get(value.dtype)
    if name is None or value.layout != torch.strided or value.is_quantized:
        raise TypeError(f"a {value.layout} tensor of dtype {value.dtype} cannot be stored; make it dense")
    if value.is_meta:
        raise TypeError("a tensor on the meta device has no values to store")
    plain = value.detach().cpu().resolve_conj().resolve_neg()
    bits = _BITS.get(plain.dtype)
    if bits is not None:
        plain = plain.contiguous().view(bits)
    return TensorBytes(name, tuple(value.shape), np.ascontiguousarray(plain.numpy()), value.element_size())


def pack(rollout: Rollout, item: Item, *, member: int, attempt: int, life: int, versions: tuple[int, int]) -> bytes:
    """Return the blob of a rollout: one copy of its tensors.

    Raises:
        RolloutInvalid: a tensor or a value of ``info`` cannot be stored; names task, item and field.
    """
    arrays, key, traces = _tensors(rollout, item) if rollout.traces else _NO_TENSORS
    oldest, newest = versions
    header = _encode(
        PayloadHeader(
            item.uid,
            item.task,
            item.epoch,
            item.index,
            member,
            attempt,
            life,
            float(rollout.reward),
            oldest,
            newest,
            rollout.tokens,
            traces,
            rollout.info if type(rollout.info) is dict else dict(rollout.info),
        ),
        item,
    )
    return _join(key, arrays, header)


_NO_TENSORS: tuple[list[Any], tuple[Any, ...], list[tuple[str, str]]] = ([], (), [])


def _tensors(rollout: Rollout, item: Item) -> tuple[list[Any], tuple[Any, ...], list[tuple[str, str]]]:
    """Return the arrays of all traces, all that a safetensors header depends on, and (agent, policy) of each trace."""
    arrays: list[Any] = []
    key: list[Any] = []
    traces: list[tuple[str, str]] = []
    for number, trace in enumerate(rollout.traces):
        if not isinstance(trace.agent, str) or not isinstance(trace.policy, str):
            raise RolloutInvalid(
                f"{item}: trace {number}: agent={trace.agent!r} and policy={trace.policy!r} must be text"
            )
        traces.append((trace.agent, trace.policy))
        for name, value in trace.tensors.items():
            try:
                name.encode()  # a lone surrogate could be written, and never be read again
                tensor = tensor_bytes(value)
            except (TypeError, ValueError, OverflowError) as error:
                raise RolloutInvalid(f"{item}: field {name!r} of trace {number}: {error}") from None
            arrays.append(tensor.array)
            key += (number, name, tensor.dtype, tensor.shape)
    return arrays, tuple(key), traces


def _encode(header: PayloadHeader, item: Item) -> bytes:
    try:
        if header.info:
            header.info = to_plain(header.info)
        return _encode_header(header)
    except TooDeepError as error:
        raise RolloutTooDeep(f"{item}: field info: {error}") from None
    except RecursionError as error:
        raise RolloutTooDeep(f"{item}: cannot be encoded: {error}") from None
    except PlainValueError as error:
        raise RolloutInvalid(f"{item}: field info: {error}") from None
    except (ValueError, OverflowError) as error:
        raise RolloutInvalid(f"{item}: cannot be encoded: {error}") from None


def _join(key: tuple[Any, ...], arrays: list[Any], item: bytes) -> bytes:
    layout = _layouts.get(key)
    if layout is None:
        layout = _plan(key, arrays)
        if len(_layouts) >= _MOST_LAYOUTS:
            _layouts.clear()
        _layouts[key] = layout
    head = layout.heads.get(len(item)) or _head(layout, len(item))
    if not arrays:
        return head + item
    if len(arrays) == 1:
        return b"".join((head, arrays[0], item))
    return b"".join((head, *[arrays[place] for place in layout.order], item))


def _head(layout: _Layout, length: int) -> bytes:
    end = layout.data_bytes + length
    text = (
        f'{layout.prefix}"{ITEM_KEY}":{{"dtype":"U8","shape":[{length}],"data_offsets":[{layout.data_bytes},{end}]}}}}'
    ).encode()
    # Spaces after the JSON are part of the format; they put the data at a multiple of 64 bytes.
    text += b" " * (-(8 + len(text)) % _ALIGN)
    head = len(text).to_bytes(8, "little") + text
    if len(layout.heads) < _MOST_HEADS:
        layout.heads[length] = head
    return head


def _plan(key: tuple[Any, ...], arrays: list[np.ndarray]) -> _Layout:
    # Wide dtypes first: every tensor is then aligned to its own item size without gaps.
    order = sorted(range(len(arrays)), key=lambda place: -arrays[place].itemsize)
    offset = 0
    parts = []
    for place in order:
        number, name, dtype, shape = key[4 * place : 4 * place + 4]
        end = offset + arrays[place].nbytes
        parts.append(
            f'{json.dumps(f"{number}.{name}")}:{{"dtype":"{dtype}","shape":[{",".join(map(str, shape))}],'
            f'"data_offsets":[{offset},{end}]}},'
        )
        offset = end
    return _Layout(order, "{" + "".join(parts), offset, {})


class _Entry(msgspec.Struct, frozen=True):
    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)
    bodies: str = ""
    """The one of all metadata that is read; no tensor has it."""


_UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, KeyError, OverflowError)
METADATA = "__metadata__"
"""What safetensors has for texts that are no tensors."""
_decode_all = msgspec.json.Decoder(dict[str, _Entry]).decode


def _decode_layout(head: bytes | bytearray | memoryview) -> dict[str, _Entry]:
    found = _decode_all(head)
    if METADATA in found and not found[METADATA].dtype:  # with one it is a tensor that somebody has called so
        del found[METADATA]
    return found


def bodies_of_head(head: bytes | memoryview) -> str:
    """Return what the length and the JSON of a blob say of ``bodies`` in it, beside its tensors; empty: nothing.

    Raises:
        Damaged: they cannot be read.
    """
    if METADATA.encode() not in bytes(head):
        return ""
    try:
        return _decode_all(bytes(head[8:])).get(METADATA, _Entry()).bodies
    except (*_UNREADABLE, RecursionError) as error:
        raise Damaged(f"payload: not a safetensors blob ({error})") from None


def read_blob(
    blob: bytes | bytearray | memoryview, where: str = "payload", *, copy: bool = True
) -> dict[str, torch.Tensor]:
    """Return every tensor of a safetensors blob, copied, so that they are the caller's to change.

    Args:
        blob: the bytes.
        where: what they are, for an error.
        copy: False returns views of ``blob``, which must be memory that can be written to and is nobody else's.

    Raises:
        Damaged: the blob is not what its header says.
    """
    try:
        layout, rest = _parts(blob)
        data = np.frombuffer(bytearray(rest) if copy else rest, np.uint8)
        return {name: _view(_bytes_of(data, entry), entry) for name, entry in layout.items()}
    except (*_UNREADABLE, RuntimeError) as error:  # of which a RecursionError is one
        raise Damaged(f"{where}: not a safetensors blob ({error})") from None


def read_bytes(blob: bytes | memoryview, where: str = "payload") -> dict[str, TensorBytes]:
    """Return every tensor of a safetensors blob as its bytes, a view of the blob: [bytes] uint8.

    Raises:
        Damaged: the blob is not what its header says.
    """
    try:
        layout, rest = _parts(blob)
        data = np.frombuffer(rest, np.uint8)
        return {
            name: TensorBytes(entry.dtype, entry.shape, _bytes_of(data, entry), _NAME_TO_TORCH[entry.dtype].itemsize)
            for name, entry in layout.items()
        }
    except (*_UNREADABLE, RecursionError) as error:
        raise Damaged(f"{where}: not a safetensors blob ({error})") from None


def layout_of_head(head: bytes, where: str = "payload") -> dict[str, tuple[str, tuple[int, ...], tuple[int, int]]]:
    """Return dtype, shape, and where in the data it begins and ends, of every tensor of a safetensors blob of which
    ``head`` is the part before the data.

    Raises:
        Damaged: it is no such part.
    """
    try:
        return {name: (each.dtype, each.shape, each.data_offsets) for name, each in _decode_layout(head[8:]).items()}
    except (*_UNREADABLE, RecursionError) as error:
        raise Damaged(f"{where}: not a safetensors blob ({error})") from None


class Laid(NamedTuple):
    """Where a tensor lies in a safetensors blob."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_layout(head: bytes | memoryview, size: int, where: str = "payload") -> dict[str, Laid]:
    """Return where each tensor of a blob of ``size`` bytes lies, of which ``head`` is the length and the JSON.

    Raises:
        Damaged: it says what cannot be.
    """
    try:
        found = {}
        for name, entry in _decode_layout(bytes(head[8:])).items():
            begin, end = (len(head) + offset for offset in entry.data_offsets)
            if not len(head) <= begin <= end <= size:
                raise ValueError(f"a tensor is said to lie at bytes {begin} to {end} of {size}")
            found[name] = Laid(entry.dtype, entry.shape, begin, end)
    except (*_UNREADABLE, RecursionError) as error:
        raise Damaged(f"{where}: not a safetensors blob ({error})") from None
    return found


def _parts(blob: bytes | bytearray | memoryview) -> tuple[dict[str, _Entry], memoryview]:
    length = int.from_bytes(blob[:8], "little")
    return _decode_layout(bytes(blob[8 : 8 + length])), memoryview(blob)[8 + length :]


def _bytes_of(data: np.ndarray, entry: _Entry) -> np.ndarray:
    start, end = entry.data_offsets
    size = _NAME_TO_TORCH[entry.dtype].itemsize
    if not 0 <= start <= end <= len(data):
        raise ValueError(f"a tensor is said to lie at bytes {start} to {end} of {len(data)}")
    # Before anything is allocated: the shape is what a damaged header says.
    if min(entry.shape, default=0) < 0 or math.prod(entry.shape) * size != end - start:
        raise ValueError(f"a tensor of shape {entry.shape} and dtype {entry.dtype} is said to take {end - start} bytes")
    return data[start:end]


def _view(data: np.ndarray, entry: _Entry) -> torch.Tensor:
    dtype = _NAME_TO_TORCH[entry.dtype]
    if not len(data):
        return torch.empty(entry.shape, dtype=dtype)
    return torch.from_numpy(data).view(dtype).reshape(entry.shape)


def tensor_of(dtype: str, shape: Sequence[int], data: np.ndarray) -> torch.Tensor:
    """Return a tensor over its bytes: [bytes] uint8, which can be written to and are nobody else's.

    Raises:
        KeyError: there is no such dtype.
        ValueError: they are more or fewer than such a tensor has.
    """
    entry = _Entry(dtype, tuple(shape), (0, len(data)))
    return _view(_bytes_of(data, entry), entry)


def read_header(blob: bytes, where: str = "payload") -> PayloadHeader:
    """Return what a blob of :func:`pack` says of itself, without copying its tensors.

    Raises:
        Damaged: the blob is not one that :func:`pack` made.
    """
    try:
        length = int.from_bytes(blob[:8], "little")
        start, end = _decode_layout(blob[8 : 8 + length])[ITEM_KEY].data_offsets
        return _decode_header(blob[8 + length + start : 8 + length + end])
    except (*_UNREADABLE, RecursionError) as error:
        raise Damaged(f"{where}: the item header is damaged ({error})") from None


def unpack(blob: bytes | memoryview, where: str = "payload") -> tuple[PayloadHeader, Rollout]:
    """Return the header and the rollout of a blob; the tensors are fresh copies.

    Raises:
        Damaged: the blob is not one that :func:`pack` made.
    """
    tensors = read_blob(blob, where)
    raw = tensors.pop(ITEM_KEY, None)
    if raw is None:
        raise Damaged(f"{where}: a safetensors blob without {ITEM_KEY!r} is no rollout")
    try:
        header = _decode_header(raw.numpy().tobytes())
        fields: list[dict[str, Any]] = [{} for _ in header.traces]
        for name, tensor in tensors.items():
            number, _, plain = name.partition(".")
            fields[int(number)][plain] = tensor
        info: Mapping[str, Any] = from_plain(header.info)
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise Damaged(f"{where}: the item header is damaged ({error})") from None
    traces = tuple(Trace(named, agent, policy) for named, (agent, policy) in zip(fields, header.traces, strict=True))
    return header, Rollout(traces, header.reward, info, header.oldest, header.newest, header.tokens)
