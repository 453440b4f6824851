"""Native code finds the cached call that the Python code of a call would find, and no other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ficco.engines.tensor_facts import CallFinder  # noqa: E402 - below the check for torch
from ficco.modules import call_cache, dispatching, routes  # noqa: E402
from ficco.schedule import Schedule  # noqa: E402

OP, REST = "matmul_reduce_scatter", ((1, 2), "rows")
Tensor = torch.Tensor

# With the API, a reader that cannot be made is a failure.
pytestmark = pytest.mark.skipif(
    not hasattr(Tensor, "__dlpack_c_exchange_api__"),
    reason="PyTorch lacks DLPack's C exchange API, as 2.9 does",
)


class Parts:
    """A finder, and what it asks."""

    def __init__(self) -> None:
        self.calls: OrderedDict[Any, Any] = OrderedDict()
        self.disabled, self.capturing = False, False
        self.finder = CallFinder(
            call_cache.reader,
            calls=self.calls,
            unordered=2,
            observers=(lambda: self.disabled, *routes.OBSERVERS),
            forward=routes.FORWARD_LEVEL,
            recording=torch.is_grad_enabled,
            group_of=self.group_of,
            automatic=("auto", lambda: self.capturing),
        )
        self.x, self.w = torch.ones(4, 3), torch.ones(3, 2)
        self.call = object()

    def group_of(self, group: Any) -> Any:
        if group == "none":
            raise ValueError("no group has this name")
        return ("group", group)

    def find(self, schedule: Any = "serial", group: Any = None, grain: Any = None) -> Any:
        return self.finder.find(OP, self.x, self.w, (None,), group, schedule, REST, grain)

    def keep(self, schedule: Any = "serial", group: Any = None, grain: Any = None) -> None:
        """Keep the call under the key that Python makes."""
        key = call_cache.key_of(OP, group, self.x, (self.w, None), schedule, *REST, grain)
        assert key is not None
        self.calls[key] = self.call


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Parts]:
    """A finder of a call that is kept."""
    found = Parts()
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capturing)
    monkeypatch.setattr(call_cache.groups, "process_group", found.group_of)
    found.keep()
    yield found


@pytest.mark.parametrize("schedule", ["serial", "auto", Schedule.named("shard_p2p")])
@pytest.mark.parametrize("grain", [None, 2])
def test_the_key_is_that_of_python(parts: Parts, schedule: Any, grain: Any) -> None:
    """The same operator, schedule, group and grain, and tensors of the same layout."""
    parts.calls.clear()
    parts.keep(schedule, "tp", grain)
    assert parts.find(schedule, "tp", grain) is parts.call
    parts.x = torch.zeros(4, 3)
    assert parts.find(schedule, "tp", grain) is parts.call
    assert parts.find(schedule, None, grain) is None
    assert parts.find(schedule, "tp", 5) is None
    assert parts.find("gated_1d", "tp", grain) is None
    parts.x = torch.zeros(3, 4).t()
    assert parts.find(schedule, "tp", grain) is None


def test_captures_have_calls_of_their_own(parts: Parts) -> None:
    """With "auto", and with no other schedule."""
    parts.keep("auto")
    parts.capturing = True
    assert parts.find("auto") is None
    assert parts.find("serial") is parts.call
    parts.keep("auto")
    assert parts.find("auto") is parts.call


def test_a_recorded_gradient_needs_the_whole_call(parts: Parts) -> None:
    """Of the input or of the weight, if gradients are recorded."""
    for tensor in (parts.x, parts.w):
        tensor.requires_grad_()
        assert parts.find() is None
        with torch.no_grad():
            assert parts.find() is parts.call
        tensor.requires_grad_(False)
    parts.w = torch.nn.Parameter(parts.w, requires_grad=False)
    assert parts.find() is parts.call


class _Seen(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Dispatched(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "mode",
    [
        _Seen,
        _Dispatched,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        torch.autograd.forward_ad.dual_level,
        nullcontext,
    ],
    ids=["function", "dispatch", "autocast", "forward", "none"],
)
def test_modes_see_the_whole_call(parts: Parts, mode: Any) -> None:
    """The call is found again when the mode has ended."""
    with ExitStack() as stack:
        stack.enter_context(mode())
        found = parts.find()
    assert (found is parts.call) == (mode is nullcontext)
    assert parts.find() is parts.call


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_transforms_and_traces_see_the_whole_call(parts: Parts) -> None:
    """vmap, and torch.jit.trace."""
    found = []

    def look(x: Any) -> Any:
        found.append(parts.find())
        return x

    torch.func.vmap(look)(torch.ones(2, 2))
    torch.jit.trace(look, torch.ones(2), check_trace=False)
    assert found == [None, None]
    parts.disabled = True
    assert parts.find() is None


class _Other(Tensor):  # type: ignore[misc]
    """A subclass may have an operation of its own."""


def test_what_else_python_looks_at(parts: Parts) -> None:
    """No tensor, a subclass, a layout without strides, a negated view, other kinds of arguments."""
    plain = parts.x
    others = None, [1.0], plain.as_subclass(_Other), plain.to_sparse(), torch._neg_view(plain)
    for other in others:
        parts.x = other
        assert parts.find() is None
    parts.x = plain
    for grain in (True, 1.0, "1"):
        assert parts.find(grain=grain) is None
    assert parts.find(schedule={"name": "serial"}) is None
    assert parts.find(schedule=None) is None
    assert parts.find(group="none") is None
    assert parts.find() is parts.call


def test_an_interrupt_is_raised(parts: Parts) -> None:
    """Errors are left to the whole call; what is no Exception is not caught."""

    def stop(group: Any) -> Any:
        raise KeyboardInterrupt

    finder = CallFinder(
        call_cache.reader, parts.calls, 2, (), routes.FORWARD_LEVEL, torch.is_grad_enabled, stop,
        ("auto", lambda: False),
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        finder.find(OP, parts.x, parts.w, (None,), None, "serial", REST, None)


def test_the_call_that_was_used_last_is_dropped_last(parts: Parts) -> None:
    """Of two calls or more, which the finder orders."""
    first = next(iter(parts.calls))
    parts.keep("shard_p2p")
    assert next(iter(parts.calls)) == first
    assert parts.find() is parts.call
    assert next(reversed(parts.calls)) == first


def test_without_the_api_python_finds_calls(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with PyTorch 2.9, and as native code does otherwise."""
    arguments = OP, parts.x, parts.w, (None,), None, "serial", REST, None
    monkeypatch.setattr(call_cache, "reader", None)
    find = dispatching._finder()
    assert find is dispatching._find_in_python
    seen = []
    monkeypatch.setattr(dispatching, "find", lambda key: seen.append(key) or parts.calls[key])
    assert find(*arguments) is parts.call and seen
    assert find(OP, None, *arguments[2:]) is None
