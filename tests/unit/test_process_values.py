"""What goes between processes: values come back as they went, frames survive any way of being cut, names are found."""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pipeline.engines.naming import Named, name_of
from pipeline.engines.values import Packer, Unpacker
from pipeline.engines.wire import APART_FROM, Done, Frame, Outgoing, Receiver, kept
from pipeline.engines.worker.loading import NotLoaded, load
from pipeline.errors import ConfigError
from pipeline.records import Item, Rollout, Trace
from pipeline.store.plain import PlainValueError, TooDeepError
from tests.support import in_workers


def through(value: Any, *, lenient: bool = False) -> Any:
    """What arrives of a value."""
    packer = Packer(lenient=lenient)
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(packer.plain(value)))
    body = bytearray(b"".join(packer.parts))
    assert len(body) == packer.size
    return Unpacker(body).value(plain)


def same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert torch.equal(one, other)
    else:
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
        assert one.shape == other.shape


TORCH = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", TORCH, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (5, 3)], ids=str)
def test_a_tensor_of_any_dtype_and_shape_arrives_as_it_was(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    given = torch.arange(int(np.prod(shape)), dtype=torch.int64).reshape(shape).to(dtype)
    found = through([given, given.clone()])
    same(given, found[0])
    same(given, found[1])
    if given.numel():
        found[0].zero_()
        same(given, found[1])


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<i8", "?", "<c16", "<M8[ns]", "<U3", "|S2", "<f2", "|u1"])
@pytest.mark.parametrize("shape", [(), (0, 2), (4,), (2, 3)], ids=str)
def test_an_array_of_any_dtype_and_shape_arrives_as_it_was(dtype: str, shape: tuple[int, ...]) -> None:
    given = np.arange(int(np.prod(shape))).reshape(shape).astype("i8").astype(dtype)
    found = through({"x": given})["x"]
    same(given, found)
    assert found.flags.writeable


def test_views_and_gradients_arrive_as_the_values_that_they_show() -> None:
    weight = torch.randn(3, 4, requires_grad=True)
    found = through([weight.T, weight[1:, ::2], np.arange(12).reshape(3, 4).T[::-1]])
    same(weight.detach().T, found[0])
    same(weight.detach()[1:, ::2], found[1])
    same(np.arange(12).reshape(3, 4).T[::-1], found[2])


def test_plain_values_rollouts_and_items_arrive_equal() -> None:
    plain = {"a": [1, 2**70, -1.5, None, True, "x\ud800", b"\0"], 3: (1, ("b",)), "nan": float("inf")}
    assert through(plain) == plain
    item = Item("t", 1, 2, 3, {"x": [1]})
    assert through(item) == item
    rollout = Rollout([Trace({"x": np.ones(2)}, "a", "p"), Trace({})], 1.5, {"k": (1,)}, 3, 4, 5)
    found = through(rollout)
    assert [(trace.agent, trace.policy, list(trace.tensors)) for trace in found] == [("a", "p", ["x"]), ("", "", [])]
    assert (found.reward, found.info, found.oldest, found.newest, found.tokens) == (1.5, {"k": (1,)}, 3, 4, 5)
    same(np.ones(2), found["x"])
    # A list of numbers is a tensor, if it stands where one does.
    same(np.array([[1, 2], [3, 4]]), through(Rollout({"x": [[1, 2], [3, 4]]}))["x"])
    assert through({"x": [[1, 2]]}) == {"x": [[1, 2]]}


def test_what_cannot_travel_is_refused_or_fails_where_the_value_itself_would() -> None:
    strange = in_workers.Strange()
    with pytest.raises(PlainValueError, match=r"Strange cannot go to another process \(at \$\.a\[1\]\)"):
        through({"a": [1, strange]})
    found = through({"a": [1, strange]}, lenient=True)["a"][1]
    assert (type(found).__name__, repr(found)) == ("Strange", "Strange()")
    with pytest.raises(TypeError, match="dtype object of a ndarray cannot be stored"):
        np.asarray(through(np.array([strange]), lenient=True))
    with pytest.raises(TooDeepError):
        through(in_workers.deep(), lenient=True)

    class Broken:
        def __repr__(self) -> str:
            raise ValueError

    assert repr(through(Broken(), lenient=True)) == "<Broken>"


# -- frames --------------------------------------------------------------------------------------------------------


def done(value: Any) -> Outgoing:
    packer = Packer()
    return Outgoing(Done(1, packer.plain(value)), packer)


def send_all(values: list[Any], sock: socket.socket) -> None:
    for each in values:
        done(each).send(sock)


def value_of(frame: Frame) -> Any:
    assert isinstance(frame.message, Done)
    return Unpacker(frame.body).value(frame.message.value)


@pytest.mark.parametrize("size", [0, 10, APART_FROM - 64, APART_FROM, 3 << 20])
def test_a_body_of_any_size_arrives_by_a_socket_that_takes_little_at_once(size: int) -> None:
    """A blocking end writes and another reads, with the smallest buffers that the system gives."""
    ours, theirs = socket.socketpair()
    given = [np.arange(size, dtype=np.uint8), {"x": "y" * (size % 1000)}, np.arange(7.0)]
    open_before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with ours, theirs:
        for each in (ours, theirs):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        writing = threading.Thread(target=send_all, args=([given] * 3, theirs))
        writing.start()
        receiver = Receiver(ours)
        frames: list[Frame] = []
        while len(frames) < 3:
            frames += receiver.receive()
        writing.join()
        for frame in frames:
            found = value_of(frame)
            same(given[0], found[0])
            assert found[1] == given[1]
            same(given[2], found[2])
            found[0][:] = 0
        found = kept(frames.pop().body)
        del frame, frames
        if open_before:
            assert len(os.listdir("/proc/self/fd")) == open_before, "a descriptor stayed open"


def test_a_socket_that_takes_no_more_says_so_and_nothing_is_lost_or_sent_twice() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        waiting = [done([np.full(100_000, n), n]) for n in range(4)] + [done(np.full(1 << 20, 5))]
        receiver = Receiver(ours)
        frames: list[Frame] = []
        while waiting or len(frames) < 5:
            try:
                while waiting:
                    waiting[0].send(theirs)
                    waiting.pop(0)
            except BlockingIOError:
                pass
            try:
                frames += receiver.receive()
            except BlockingIOError:
                assert waiting
        assert [value_of(frame)[1] for frame in frames[:4]] == [0, 1, 2, 3]
        same(np.full(1 << 20, 5), value_of(frames[4]))
        with pytest.raises(BlockingIOError):
            receiver.receive()
        theirs.close()
        with pytest.raises(EOFError):
            receiver.receive()


def test_a_large_body_goes_by_the_socket_where_there_is_no_memory_without_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(name: str) -> int:
        raise OSError(24, "too many files")

    monkeypatch.setattr(os, "memfd_create", none, raising=False)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        given = np.arange(1 << 20, dtype=np.uint8)
        writing = threading.Thread(target=send_all, args=([given], theirs))
        writing.start()
        receiver = Receiver(ours)
        frames: list[Frame] = []
        while not frames:
            frames += receiver.receive()
        writing.join()
        same(given, value_of(frames[0]))


def test_what_is_not_sent_and_what_is_not_asked_for_leaves_no_descriptor_open() -> None:
    if not hasattr(os, "memfd_create"):
        pytest.skip("no memory without a name here")
    before = len(os.listdir("/proc/self/fd"))
    outgoing = done(np.zeros(1 << 20))
    assert len(os.listdir("/proc/self/fd")) == before + 1
    outgoing.close()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done(np.zeros(1 << 20)).send(theirs)
        receiver = Receiver(ours)
        del receiver.receive()[:]
        receiver.close()
    assert len(os.listdir("/proc/self/fd")) == before


# -- names ---------------------------------------------------------------------------------------------------------


def test_a_function_is_named_by_its_module_and_found_by_that_name() -> None:
    here = "tests.support.in_workers"
    assert name_of(in_workers.add, "run") == Named(here, "add")
    for given, arguments, expected in (
        (in_workers.add, (1, 2), 3),
        ("tests.support.in_workers:add", (1,), 2),
        (in_workers.number_of, (1,), 101),
        (functools.partial(in_workers.number_of, 5), (), 105),
        (in_workers.Methods.static, (2,), 4),
        (in_workers.Methods.of_class, (2,), 6),
        (functools.partial(in_workers.add, (1, 2), second=(3,)), (), (1, 2, 3)),
    ):
        named = msgspec.msgpack.decode(msgspec.msgpack.encode(name_of(given, "run")), type=Named)
        assert load(named)(*arguments) == expected


def wrapped() -> None:
    """Its name leads to something else."""


original, wrapped = wrapped, functools.wraps(wrapped)(lambda: None)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (lambda: None, "is a lambda"),
        (functools.partial(lambda: None), "is a lambda"),
        (in_workers.Methods().plain, "is not what tests.support.in_workers:Methods.plain is"),
        (in_workers.Methods(), "has no name of its own"),
        (original, "is not what .*:wrapped is"),
        (functools.partial(in_workers.add, in_workers.Strange()), "an argument of the partial: a Strange"),
        ("no name", "'module:function' is needed"),
        ("a.b", "'module:function' is needed"),
    ],
)
def test_what_cannot_be_imported_by_name_is_refused_with_the_reason(given: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=f"^task 'x': run: .*{why}") as caught:
        name_of(given, "task 'x': run", "run")
    assert caught.value.option == "run"


def test_a_function_inside_another_and_one_of_a_notebook_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def inner() -> None: ...

    with pytest.raises(
        ConfigError, match=r"is defined inside another function\. Write it as a function at the top level"
    ):
        name_of(inner, "run")
    monkeypatch.setattr(inner, "__qualname__", "inner")
    monkeypatch.setattr(inner, "__module__", "__main__")
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(ConfigError, match="in a notebook or an interactive session"):
        name_of(inner, "run")


@pytest.mark.parametrize(
    ("module", "name", "why"),
    [
        ("no_such_module", "x", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("tests.support.in_workers", "no_such", "AttributeError"),
        ("tests.support.in_workers", "BIG", "is a int, and nothing that can be called"),
        ("__main__", "x", "has no script"),
    ],
)
def test_what_is_not_there_is_said_with_its_name(module: str, name: str, why: str) -> None:
    with pytest.raises(NotLoaded, match=f"{module}:{name} cannot be imported: .*{why}"):
        load(Named(module, name))
