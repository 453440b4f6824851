"""ficco._native as Python sees it: its stub, its errors, its lifetimes, and that it frees the GIL.

What lanes do with rows is held by the native tests.
"""

from __future__ import annotations

import ast
import gc
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ficco import _native, plan

STUB = Path(__file__).resolve().parents[2] / "ficco" / "_native.pyi"
COPY, RAISE, WAIT, CLEAR, AFTER = range(5)
INLINE = -1
NO_WINDOWS = np.zeros((0, 4), np.int64)


def rows(*ops: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return ops: (segment, lane, kind, step, ...), filled up with zeros."""
    return np.array([[*op, *[0] * (16 - len(op))] for op in ops], np.int64).reshape(-1, 16)


def word(name: str, rank: int, peer: int, chunk: int = 0) -> int:
    return plan.signal_place(plan.Signal(rank, name, peer, chunk))


def program(group: _native.Group, rank: int, *ops: tuple[int, ...]) -> _native.Program:
    """Bind rows of one segment, with two steps and no slots."""
    return _native.Program(group, rank, rows(*ops), NO_WINDOWS, 1, 2, 0)


class TestStub:
    def arguments(self, function: Any) -> set[tuple[str, ...]]:
        """Names of the arguments of each overload of a native function."""
        found = set()
        for signature, *_ in function.__nb_signature__:
            bare, inner = signature, 1
            while inner:  # brackets within brackets
                bare, inner = re.subn(r"\[[^][]*\]", "", bare)
            given, _, _ = bare.partition("(")[2].partition(")")
            found.add(tuple(part.split(":")[0] for part in given.split(", ") if part))
        return found

    def test_names_and_arguments_agree_with_the_module(self) -> None:
        native: dict[str, set[tuple[str, ...]]] = {}
        for name, thing in vars(_native).items():
            if isinstance(thing, type):
                for method, function in vars(thing).items():
                    if hasattr(function, "__nb_signature__") and method != "__new__":
                        native[f"{name}.{method}"] = self.arguments(function)
                    elif isinstance(function, property):
                        native[f"{name}.{method}"] = {("self",)}
            elif hasattr(thing, "__nb_signature__"):
                native[name] = self.arguments(thing)
            elif not name.startswith("_"):
                native[name] = set()

        stub: dict[str, set[tuple[str, ...]]] = {}
        for node in ast.parse(STUB.read_text()).body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                stub[node.target.id] = set()
            elif isinstance(node, ast.FunctionDef):
                stub[node.name] = {tuple(a.arg for a in node.args.args)}
            elif isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef):
                        names = tuple(a.arg for a in method.args.args)
                        stub.setdefault(f"{node.name}.{method.name}", {names})
        assert native == stub

    def test_sizes_are_those_of_plans(self) -> None:
        assert _native.MAX_WORLD == plan.MAX_WORLD
        assert _native.MAX_CHUNKS == plan.MAX_CHUNKS
        assert _native.WORDS_PER_COPY == plan.SIGNALS_PER_COPY

    def test_only_free_of_peers_is_raised_at_first(self) -> None:
        group = _native.Group(3, 1.0, None)
        for rank in range(3):
            raised = {word("free", rank, peer) for peer in range(3) if peer != rank}
            for copy in range(2):
                words = [group.word(rank, copy, i) for i in range(_native.WORDS_PER_COPY)]
                assert {i for i, value in enumerate(words) if value} == raised
                assert sum(words) == len(raised)


class TestErrors:
    def test_arguments_out_of_range_are_value_errors(self) -> None:
        group = _native.Group(2, 1.0, None)
        with pytest.raises(ValueError, match=r"ops\[1\]: field 1 \(lane\) is 128, not -1 to 127"):
            program(group, 0, (0, 0, CLEAR, 0), (0, 128, CLEAR, 0))
        with pytest.raises(ValueError, match="world is 65, not 1 to 64"):
            _native.Group(65, 1.0, None)
        with pytest.raises(ValueError, match='"pair" or "port", not "both"'):
            _native.Fabric(2, "both", 1.0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="rank is 2, not 0 to 1"):
            group.window(2, 0)

    def test_other_arrays_are_type_errors(self) -> None:
        group = _native.Group(2, 1.0, None)
        with pytest.raises(TypeError):
            _native.Program(group, 0, np.zeros((1, 15), np.int64), NO_WINDOWS, 1, 1, 0)
        with pytest.raises(TypeError):
            _native.Program(None, 0, rows(), NO_WINDOWS, 1, 1, 0)  # type: ignore[arg-type]

    def test_calls_out_of_season_are_runtime_errors(self) -> None:
        group = _native.Group(2, 1.0, None)
        bound = program(group, 0, (0, 0, CLEAR, 0))
        with pytest.raises(RuntimeError, match="no call runs"):
            bound.submit(0)
        bound.start(0, 0, [], [])
        with pytest.raises(RuntimeError, match="1 programs run; finish them first"):
            group.reset()
        assert bound.finish()

    def test_memory_that_cannot_be_had_is_a_memory_error(self) -> None:
        group = _native.Group(2, 1.0, None)
        group.grow(1)
        capacity = group.capacity
        with pytest.raises(MemoryError, match=str(2 << 50)):
            group.grow(1 << 50)
        assert group.capacity == capacity

    def test_the_first_failure_is_told(self) -> None:
        group = _native.Group(2, 0.02, None)
        assert group.failure() is None
        entered = word("entered", 0, 1)
        bound = program(group, 0, (0, INLINE, WAIT, 1, 0, entered, 0, 1))
        bound.start(0, 7, [], [])
        assert not bound.submit(0)
        assert not bound.finish()
        group.fail(1)
        failure = group.failure()
        assert failure is not None
        *place, kind, seconds, found, expected = failure
        assert place == [0, 1, 0, entered]
        assert (kind, found, expected) == ("timeout", 0, 7)
        assert seconds >= 0.02
        group.reset()
        group.fail(1)
        assert group.failure() == (1, -1, -1, -1, "stopped", 0.0, 0, 0)


@pytest.mark.parametrize("as_list", [False, True])
def test_slots_come_as_arrays_or_lists(as_list: bool) -> None:
    group = _native.Group(1, 5.0, None)
    group.grow(64)
    source = np.arange(12, dtype=np.int32).reshape(3, 4)
    target = np.zeros((3, 4), np.int32)
    bound = _native.Program(
        group,
        0,
        rows(
            (0, 0, COPY, 0, 0, 0, 4, 1, 0, 0, 3, 8, -1), (0, 0, COPY, 0, 1, 0, 0, 2, 0, 8, 3, 8, -1)
        ),
        np.array([[1, 0, 16, 8]], np.int64),
        1,
        1,
        3,
    )
    addresses = np.array([source.ctypes.data, 0, target.ctypes.data], np.uint64)
    pitches = np.array([16, 0, 16], np.int64)
    if as_list:
        bound.start(1, 0, addresses.tolist(), pitches.tolist())
    else:
        bound.start(1, 0, addresses, pitches)
    begin = _native.now_ns()
    assert bound.submit(0)
    assert bound.finish()
    assert (target[:, 2:] == source[:, 1:3]).all()
    assert (target[:, :2] == 0).all()
    [(first, last)] = bound.times()
    assert begin <= first <= last <= _native.now_ns()


def test_waiting_frees_the_gil() -> None:
    group = _native.Group(2, 60.0, None)
    data = word("data", 0, 1)
    waits = program(group, 0, (0, INLINE, WAIT, 0, 0, data, 1))
    raises = program(group, 1, (0, 0, RAISE, 0, 0, data, 1))
    done = []

    def wait() -> None:
        waits.start(0, 0, [], [])
        done.append(waits.submit(0) and waits.finish())

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.02)
    raises.start(0, 0, [], [])
    assert raises.submit(0)
    assert raises.finish()
    thread.join()
    assert done == [True]


@pytest.mark.parametrize("running", [False, True])
def test_a_program_keeps_its_group(running: bool) -> None:
    group: _native.Group | None = _native.Group(1, 0.02, _native.Fabric(1, "port", 1.0))
    assert group is not None
    bound: _native.Program | None = program(group, 0, (0, 0, WAIT, 0, 0, 0, 1))
    del group
    gc.collect()
    assert bound is not None
    bound.start(0, 0, [], [])
    bound.submit(0)
    if not running:
        assert not bound.finish()
    before = threads()
    del bound
    gc.collect()
    assert before >= threads() + 1


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


class TestSharedGroups:
    """Groups whose ranks are processes; two in this process stand for them."""

    def test_ranks_see_each_other_and_one_failure(self) -> None:
        files = len(list(Path("/proc/self/fd").iterdir()))
        mapped = Path("/proc/self/maps").read_text().count("memfd:ficco")
        memory = _native.create_memory(2, 5000)
        fabric = _native.join_fabric(memory, 2, "port", 1.0)
        first = _native.join_group(memory, 2, 0, 5000, 0.02, fabric)
        assert first.rank_state(1)[0] == "absent"
        second = _native.join_group(memory, 2, 1, 5000, 30.0, None)
        os.close(memory)
        assert fabric.per == "port"
        assert first.capacity == second.capacity >= 5000
        raising = program(second, 1, (0, INLINE, RAISE, 0, 0, word("data", 0, 1), 1))
        raising.start(0, 9, [], [])
        assert raising.submit(0)
        assert raising.finish()
        assert first.word(0, 0, word("data", 0, 1)) == 1
        presence, age_s, calls, digest, preparing = first.rank_state(1)
        assert not preparing
        assert (presence, calls, digest) == ("here", 1, 9)
        assert 0 <= age_s < 5

        waiting = program(first, 0, (0, INLINE, WAIT, 1, 0, word("data", 0, 1, 5), 1))
        waiting.start(0, 9, [], [])
        assert not waiting.submit(0)
        assert not waiting.finish()
        assert second.failure() == first.failure() is not None
        second.close()
        assert first.rank_state(1)[0] == "closed"
        del waiting, raising, first, second, fabric
        gc.collect()
        assert len(list(Path("/proc/self/fd").iterdir())) == files
        assert Path("/proc/self/maps").read_text().count("memfd:ficco") == mapped

    def test_errors(self) -> None:
        with pytest.raises(MemoryError, match=str(1 << 44)):
            _native.create_memory(2, 1 << 44)
        memory = _native.create_memory(2, 0)
        group = _native.join_group(memory, 2, 0, 0, 1.0, None)
        with pytest.raises(ValueError, match="joined already"):
            _native.join_group(memory, 2, 0, 0, 1.0, None)
        with pytest.raises(RuntimeError, match="join other memory"):
            group.grow(1)
        with pytest.raises(ValueError, match="runs in another process"):
            program(group, 1, (0, 0, CLEAR, 0))
        os.close(memory)
