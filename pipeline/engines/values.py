"""What goes to another process and comes back: plain values, and tensors beside them.

Plain values travel as :mod:`pipeline.store.plain` writes them; arrays, torch tensors and rollouts among them leave a
mark in their place, and their bytes lie in one body behind the message, each at a multiple of 64. Nothing is pickled,
and torch is not imported where nobody has used it.

A value that cannot travel is refused, or, with ``lenient``, travels as a stand-in that fails where the value itself
would have: a runner that returns what cannot be stored is told the same, wherever it ran.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.records import Item, Rollout, Trace
from pipeline.store.plain import MARK, PlainValueError, from_plain, to_plain

_ALIGN = 64
_SHOWN = 200
_NOTHING = bytes(_ALIGN)
_AS_IT_IS = frozenset((type(None), bool, float, bytes))
_NESTED = frozenset((dict, list))


class Foreign:
    """Stands for a value that could not travel."""

    def __init__(self, shown: str, why: str) -> None:
        self._shown, self._why = shown, why

    def __repr__(self) -> str:
        return self._shown

    def __array__(self, *args: Any, **more: Any) -> np.ndarray:
        raise TypeError(self._why)


class Packer:
    """Turns the values of one message into plain ones, and gathers the bytes that go behind it."""

    def __init__(self, *, lenient: bool = False) -> None:
        self.parts: list[Any] = []
        """Buffers, in order."""
        self.size = 0
        """Their bytes in all."""
        self._lenient = lenient

    def plain(self, value: Any) -> Any:
        """Return ``value`` in terms that MessagePack keeps.

        Raises:
            PlainValueError: it holds something that cannot travel; the message says where.
            TooDeepError: it is nested too deep.
        """
        if type(value) in _AS_IT_IS:
            return value
        return to_plain(value, leaf=self._leaf)

    def _leaf(self, value: Any, path: str) -> Any:
        if isinstance(value, tuple):
            return None
        if isinstance(value, np.ndarray) or _is_tensor(value):
            return self._tensor(value, path)
        if isinstance(value, Rollout):
            fields = (value.reward, value.info, value.oldest, value.newest, value.tokens)
            return {MARK: ["rollout", [self._traces(value.traces), *map(self.plain, fields)]]}
        if isinstance(value, Trace):
            return self._trace(value)
        if isinstance(value, Item):
            names = (value.task, value.epoch, value.index, value.uid)
            return {MARK: ["item", [*names, self.plain(value.content)]]}
        if hasattr(value, "__array__"):
            return self._tensor(value, path)
        return self._foreign(value, path, f"a {type(value).__name__} cannot go to another process")

    def _traces(self, traces: Any) -> Any:
        if type(traces) is not tuple:
            return self.plain(traces)
        return {
            MARK: ["tuple", [self._trace(each) if isinstance(each, Trace) else self.plain(each) for each in traces]]
        }

    def _trace(self, trace: Trace) -> Any:
        if not isinstance(trace.tensors, Mapping):
            named = self.plain(trace.tensors)
        else:
            pairs = [[self.plain(name), self._tensor(value, repr(name))] for name, value in trace.tensors.items()]
            named = {MARK: ["map", pairs]}
        return {MARK: ["trace", [named, self.plain(trace.agent), self.plain(trace.policy)]]}

    def _tensor(self, value: Any, path: str) -> Any:
        """What stands where a tensor is asked for: a list of numbers is one as well."""
        try:
            if _is_tensor(value):
                from pipeline.store.codec import tensor_bytes

                tensor = tensor_bytes(value)
                return {MARK: ["tensor", [tensor.dtype, list(tensor.shape), *self._put(tensor.array)]]}
            if isinstance(value, np.ma.MaskedArray):
                raise TypeError("a masked array cannot be stored; store its data and its mask as two tensors")
            array = np.asarray(value)
            if array.dtype.hasobject or array.dtype.names is not None:
                raise TypeError(f"dtype {array.dtype} of a {type(value).__name__} cannot be stored")
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            return self._foreign(value, path, str(error))
        return {MARK: ["array", [array.dtype.str, list(array.shape), *self._put(np.ascontiguousarray(array))]]}

    def _put(self, array: np.ndarray) -> tuple[int, int]:
        begin, size = self.size, array.nbytes
        if size:
            padding = -size % _ALIGN
            self.parts.append(array.reshape(-1).view(np.uint8))
            if padding:
                self.parts.append(_NOTHING[:padding])
            self.size += size + padding
        return begin, size

    def _foreign(self, value: Any, path: str, why: str) -> Any:
        if not self._lenient:
            raise PlainValueError(f"{why} (at {path}); plain values, arrays, tensors and rollouts can")
        try:
            shown = repr(value)[:_SHOWN]
        except Exception:
            shown = f"<{type(value).__name__}>"
        return {MARK: ["foreign", [type(value).__name__, self.plain(shown), self.plain(why)]]}


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


class Unpacker:
    """Undoes what a :class:`Packer` did. The tensors are views of ``body``, which is nobody else's."""

    def __init__(self, body: Any) -> None:
        self._body = body

    def value(self, plain: Any) -> Any:
        """Return the value that was packed."""
        if type(plain) not in _NESTED:
            return plain
        return from_plain(plain, leaf=self._leaf)

    def _leaf(self, kind: str, content: Any) -> Any:
        if kind == "array":
            dtype, shape, begin, size = content
            return self._array(np.dtype(dtype), shape, begin, size)
        if kind == "tensor":
            from pipeline.store.codec import tensor_of

            name, shape, begin, size = content
            return tensor_of(name, shape, self._array(np.dtype(np.uint8), [size], begin, size))
        if kind == "foreign":
            name, shown, why = content
            return type(name, (Foreign,), {})(self.value(shown), self.value(why))
        if kind == "rollout":
            return Rollout(*map(self.value, content))
        if kind == "trace":
            return Trace(*map(self.value, content))
        if kind == "item":
            task, epoch, index, uid, given = content
            return Item(task, epoch, index, uid, self.value(given))
        raise PlainValueError(f"a value of the unknown kind {kind!r} came from another process")

    def _array(self, dtype: np.dtype[Any], shape: Sequence[int], begin: int, size: int) -> np.ndarray:
        if not size:
            return np.empty(shape, dtype)
        return np.ndarray(shape, dtype, buffer=self._body, offset=begin)
