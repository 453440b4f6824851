"""Native and Python code find the same cached calls, and no other."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ficco.api import call_cache, groups, routes  # noqa: E402
from ficco.api.call_cache import Form  # noqa: E402
from ficco.engine.repeated_calls import CallFinder, flat_table  # noqa: E402 - below the check
from ficco.plan.schedule import Schedule  # noqa: E402

OP, REST = "matmul_reduce_scatter", ((1, 2), "rows")
FORM = Form(OP, bias=True, rest=REST, unset=("rows", "axes"), flags=("keeps",))
Tensor = torch.Tensor

# With the API, a reader that cannot be made is a failure.
needs_api = pytest.mark.skipif(
    not hasattr(Tensor, "__dlpack_c_exchange_api__"),
    reason="PyTorch lacks DLPack's C exchange API, as 2.9 does",
)


class Everyone:
    """Has the group of all ranks."""

    WORLD: Any = ("group", None)


class Parts:
    """A finder, what it asks, and a call that is kept."""

    def __init__(self, native: bool) -> None:
        self.calls: OrderedDict[Any, Any] = OrderedDict()
        self.capturing = False
        self.look: Any = self._native_find() if native else call_cache._find_in_python
        self.x, self.w = torch.ones(4, 3), torch.ones(3, 2)
        self.call = SimpleNamespace(changes=groups.changes(), ready=True, moved=False)

    def _native_find(self) -> Any:
        return CallFinder(
            call_cache.reader,
            calls=(self.calls, 2),
            off="FICCO_DISABLE",
            observers=routes.OBSERVERS,
            forward=routes.FORWARD_LEVEL,
            recording=torch.is_grad_enabled,
            group_of=(Everyone, self.group_of),
            automatic=("auto", lambda: self.capturing),
        ).find

    def group_of(self, group: Any) -> Any:
        if group == "none":
            raise ValueError("no group has this name")
        return Everyone.WORLD if group is None else ("group", group)

    def find(self, schedule: Any = "serial", form: Form = FORM, **words: Any) -> Any:
        return self.call_of(form, (self.x, self.w), {"schedule": schedule, **words})

    def call_of(self, form: Form, args: tuple[Any, ...], words: dict[str, Any]) -> Any:
        """Return the cached call alone."""
        found = self.look(form, args, words)
        return None if found is None else found[0]

    def keep(self, schedule: Any = "serial", group: Any = None, grain: Any = None) -> None:
        """Keep the call under the key that Python makes."""
        key = call_cache.key_of(OP, group, self.x, (self.w, None), schedule, *REST, grain)
        assert key is not None
        self.calls[key] = self.call


@pytest.fixture(params=[pytest.param("native", marks=needs_api), "python"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Parts]:
    """A finder of a call that is kept."""
    found = Parts(request.param == "native")
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capturing)
    monkeypatch.setattr(call_cache, "process_group", found.group_of)
    monkeypatch.setattr(call_cache, "calls", found.calls)
    monkeypatch.setattr(call_cache, "UNORDERED_CALLS", 2)
    found.keep()
    yield found


@pytest.mark.parametrize("schedule", ["serial", "auto", Schedule.named("shard_p2p")])
@pytest.mark.parametrize("grain", [None, 2])
def test_the_key_is_that_of_python(parts: Parts, schedule: Any, grain: Any) -> None:
    """The same operator, schedule, group and grain, and tensors of the same layout."""
    parts.calls.clear()
    parts.keep(schedule, "tp", grain)
    assert parts.find(schedule, group="tp", grain=grain) is parts.call
    parts.x = torch.zeros(4, 3)
    assert parts.find(schedule, group="tp", grain=grain) is parts.call
    assert parts.find(schedule, grain=grain) is None
    assert parts.find(schedule, group="tp", grain=5) is None
    assert parts.find("gated_1d", group="tp", grain=grain) is None
    parts.x = torch.zeros(3, 4).t()
    assert parts.find(schedule, group="tp", grain=grain) is None


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
def test_transforms_and_traces_see_the_whole_call(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vmap, and torch.jit.trace."""
    found = []

    def look(x: Any) -> Any:
        found.append(parts.find())
        return x

    torch.func.vmap(look)(torch.ones(2, 2))
    torch.jit.trace(look, torch.ones(2), check_trace=False)
    assert found == [None, None]
    assert parts.find() is parts.call
    monkeypatch.setenv("FICCO_DISABLE", "1")
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


@needs_api
def test_an_interrupt_is_raised(parts: Parts) -> None:
    """Errors are left to the whole call; what is no Exception is not caught."""

    def stop(group: Any) -> Any:
        raise KeyboardInterrupt

    finder = CallFinder(
        call_cache.reader, (parts.calls, 2), "FICCO_DISABLE", (), routes.FORWARD_LEVEL,
        torch.is_grad_enabled, (Everyone, stop), ("auto", lambda: False),
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        finder.find(FORM, (parts.x, parts.w), {"group": "tp"})


def test_the_call_that_was_used_last_is_dropped_last(parts: Parts) -> None:
    """Of two calls or more, which the finder orders."""
    first = next(iter(parts.calls))
    parts.keep("shard_p2p")
    assert next(iter(parts.calls)) == first
    assert parts.find() is parts.call
    assert next(reversed(parts.calls)) == first


def test_without_the_api_python_finds_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with PyTorch 2.9."""
    monkeypatch.setattr(call_cache, "reader", None)
    assert call_cache._finder() is call_cache._find_in_python


def test_arguments_by_name(parts: Parts) -> None:
    """What a form says of further arguments; all else needs the whole call."""
    find, call = parts.find, parts.call
    assert find(rows=None) is find(axes=None, bias=None, keeps=True) is find(keeps=False) is call
    for words in ({"rows": [4]}, {"bias": parts.w}, {"keeps": None}, {"keeps": 1}, {"more": None}):
        assert find(**words) is None
    x, w, words = parts.x, parts.w, {"schedule": "serial"}
    assert parts.call_of(FORM, (x, w), words) is call
    for args in ((), (x,), (x, w, None), (x, w, "tp")):
        assert parts.look(FORM, args, words) is None
    assert parts.look(FORM, (x,), {**words, "w": w}) is None


def test_a_bias_is_one_more_tensor(parts: Parts) -> None:
    """It is a part of the key, and of the tensors of the call."""
    bias = torch.ones(2)
    assert parts.find(bias=bias) is None
    key = call_cache.key_of(OP, None, parts.x, (parts.w, bias), "serial", *REST, None)
    parts.calls[key] = parts.call
    found = parts.look(FORM, (parts.x, parts.w), {"schedule": "serial", "bias": bias})
    assert found is not None and found[0] is parts.call and found[2] is False
    assert [*map(id, found[1])] == [*map(id, (parts.x, parts.w, bias))]
    assert parts.find(bias=bias.requires_grad_()) is None
    assert parts.find(bias=[torch.ones(2)]) is None
    assert parts.find(form=FORM._replace(bias=False), bias=torch.ones(2)) is None


SEVERAL = Form(OP, several=True, bias=True, rest=REST)
V = torch.ones(3, 5)
B, C = torch.ones(2), torch.ones(5)


@pytest.mark.parametrize(
    ("weights", "biases", "kept", "biased"),
    [
        (None, None, [], (False,)),
        (None, B, [B], (True,)),
        (None, [B], [B], (True,)),
        ([], None, [], (False,)),
        ([V], None, [V], (False, False)),
        ([V], [None, None], [V], (False, False)),
        ((V,), (None, C), [V, C], (False, True)),
        ([V, V], [B, None, C], [V, V, B, C], (True, False, True)),
        ([V], B, [V, B, B], (True, True)),
    ],
)
def test_several_weights_and_their_biases(
    parts: Parts, weights: Any, biases: Any, kept: list[Tensor], biased: tuple[bool, ...]
) -> None:
    """Weights come after the first; None: the first is no list."""
    w = parts.w if weights is None else type(weights)((parts.w, *weights))
    words = {"schedule": "serial", "bias": biases}
    assert parts.look(SEVERAL, (parts.x, w), words) is None
    key = call_cache.key_of(OP, None, parts.x, (parts.w, *kept), "serial", biased, *REST, None)
    parts.calls[key] = parts.call
    found = parts.look(SEVERAL, (parts.x, w), words)
    assert found is not None and found[0] is parts.call and found[2] is (weights is not None)
    assert [*map(id, found[1])] == [*map(id, (parts.x, parts.w, *kept))]


def test_lists_that_do_not_fit(parts: Parts) -> None:
    """They need the whole call, which refuses them."""
    key = call_cache.key_of(OP, None, parts.x, (parts.w,), "serial", (False,), *REST, None)
    parts.calls[key] = parts.call
    words = {"schedule": "serial"}
    assert parts.call_of(SEVERAL, (parts.x, [parts.w]), words) is parts.call
    for w, bias in (
        ([parts.w], []), ([parts.w], [None, None]), (parts.w, [None, None]), ([], None),
        ([parts.w, None], None), ([parts.w.clone().requires_grad_()], None), ("w", None),
    ):  # fmt: skip
        assert parts.look(SEVERAL, (parts.x, w), {**words, "bias": bias}) is None
    assert parts.look(SEVERAL, ([parts.x], [parts.w]), words) is None
    weights = iter([parts.w])
    assert parts.look(SEVERAL, (parts.x, weights), words) is None
    assert [*weights] == [parts.w]  # the call reads them
    assert parts.look(FORM, (parts.x, [parts.w]), words) is None


def test_the_table_of_an_exchange(parts: Parts) -> None:
    """By place or by name, of lists and of tuples."""
    form = Form(OP, bias=True, rest=REST, table="splits")
    key = call_cache.key_of(OP, None, parts.x, (parts.w, None), "serial", *REST, (1, 2, 3, 4), None)
    parts.calls[key] = parts.call
    look = partial(parts.call_of, form, (parts.x, parts.w))
    for table in ([[1, 2], [3, 4]], ((1, 2), (3, 4)), [(1, 2), [3, 4]]):
        by_place = parts.call_of(form, (parts.x, parts.w, table), {"schedule": "serial"})
        assert by_place is look({"schedule": "serial", "splits": table}) is parts.call
        both = (parts.x, parts.w, table), {"schedule": "serial", "splits": table}
        assert parts.look(form, *both) is None
    for table in ([[1, 2], [3, 5]], [[1, 2, 3, 4]], [1, 2], None):
        assert look({"schedule": "serial", "splits": table}) is None
    assert look({"schedule": "serial"}) is None
    more = (parts.x, parts.w, [[1, 2], [3, 4]], None)
    assert parts.look(form, more, {"schedule": "serial"}) is None
    assert parts.find() is parts.call


class _Shrinking:
    """Empties the tables when it is collected."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows, self.itself = rows, self

    def __del__(self) -> None:
        for row in self.rows:
            row.clear()
        self.rows.clear()


def test_a_table_that_changes_while_it_is_read() -> None:
    """By what is collected meanwhile, or by another thread: it is read, or it is not."""
    limits = gc.get_threshold()
    try:
        for first in range(1, 12):
            rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
            gc.collect()
            _Shrinking(rows)
            gc.set_threshold(first)
            assert flat_table(rows) in (tuple(range(1, 10)), None)
            gc.set_threshold(*limits)
    finally:
        gc.set_threshold(*limits)


def test_rows_are_looked_at_before_memory_is_taken() -> None:
    """A list of a million sizes is no table; as one, it would have 10**12."""
    assert flat_table([1] * 10**6) is None
    assert flat_table([[1]] * 10**6) is None


class _List(list[Any]):
    """May give other items than it holds."""


def test_a_flat_table() -> None:
    """Of ints and no others; lists and tuples alone."""
    assert flat_table([]) == ()
    assert flat_table(((7,),)) == (7,)
    assert flat_table([[1, 2, 3], (4, 5, 6), [7, 8, 2**70]]) == (*range(1, 9), 2**70)
    for table in (
        None, 3, "ab", {1: 2}, [[True]], [[1.0]], [[1, 2]], [[1], [2]], [[1, 2], [3]],
        [[1, 2], None], [[1, 2], "ab"], _List([[1]]), [_List([1])],
        torch.ones(1, 1, dtype=torch.int64),
    ):  # fmt: skip
        assert flat_table(table) is None
