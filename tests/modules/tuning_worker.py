"""A rank whose calls with schedule="auto" are measured by ficco.tune.

python tuning_worker.py STORE RANK WORLD
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from joining import join_gloo

import ficco
from ficco.api import auto, groups, tuning
from ficco.core.logs import log
from ficco.runtime.process import ProcessRuntime

Tensor = torch.Tensor
TIMEOUT_S = 3.0
BROKEN_FILES = (
    "{}", "", "[" * 10**5, '{"date": 0, "schedules": [], "ms": {}}',
    '{"date": 0, "schedules": [{"name": "serial"}], "ms": {"eager": [NaN]}}',
    '{"date": 0, "schedules": [{"name": "serial"}], "ms": [5]}', "fifo", "huge", "elsewhere",
    "twice",
)  # fmt: skip
EDITED_FILES = BROKEN_FILES[-3:]  # still files of ficco.tune, which are written again


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def opened(**options: Any) -> ProcessRuntime:
    ficco.prepare(timeout_s=TIMEOUT_S, **options)
    (runtime,) = groups.opened(None)
    return runtime


def options_are_checked() -> None:
    for wrong in (0, 65, "4", 2.0, True, None):
        try:
            with ficco.tune(schedules=wrong):  # type: ignore[arg-type]
                raise AssertionError(f"schedules={wrong!r} was taken")
        except ficco.InputError as error:
            assert "schedules" in str(error), error
    assert not tuning._sessions


def gradients(rank: int, world: int) -> None:
    """The calls of backward are measured, too; gradients are right."""
    runtime = opened()
    x = draw(rank, 6, 8).requires_grad_()
    w = draw(10 + rank, 8, 5).requires_grad_()
    with ficco.tune(schedules=2):
        ficco.all_gather_matmul(x, w).square().sum().backward()
    assert len(auto.tuned[runtime]) >= 2, "no call of backward was measured"
    whole = torch.cat([draw(r, 6, 8) for r in range(world)]).double()
    ws = [draw(10 + r, 8, 5).double() for r in range(world)]
    want = sum((2 * (whole @ each) @ each.t() for each in ws), torch.zeros(6 * world, 8).double())
    assert x.grad is not None and w.grad is not None
    torch.testing.assert_close(x.grad.double(), want[6 * rank : 6 * rank + 6], rtol=1e-4, atol=1e-4)
    mine = 2 * whole.t() @ (whole @ ws[rank])
    torch.testing.assert_close(w.grad.double(), mine, rtol=1e-4, atol=1e-4)
    ficco.close()


def models(rank: int, world: int) -> None:
    """A layer's call is measured, and explain says so."""
    opened()
    model = torch.nn.Sequential(torch.nn.Linear(8, 4, bias=False)).eval()
    ficco.overlap(model, plan={"0": "rowwise"})
    with torch.no_grad():
        with ficco.tune():
            y = model(draw(rank, 16, 8))
        assert torch.equal(y, model(draw(rank, 16, 8)))
    told = str(ficco.explain(model))
    assert "by the measurement" in told and "measured here by ficco.tune" in told, told
    ficco.close()


def bags(rank: int, world: int) -> None:
    """Pooling is measured; ranks pool different numbers of lookups."""
    runtime = opened()
    tables = [draw(r, 9, 6) for r in range(world)]
    lookups = [torch.arange(5 + r) % 9 for r in range(world)]
    starts = torch.arange(world)
    with ficco.tune():
        y = ficco.embedding_all_to_all(
            [tables[rank]], [lookups[rank]], [starts],
            tables_per_rank=[1] * world, dimension=6, batch=world,
        )  # fmt: skip
    pooled = [
        torch.nn.functional.embedding_bag(lookups[r], tables[r], starts, mode="sum")[rank]
        for r in range(world)
    ]
    torch.testing.assert_close(y, torch.cat(pooled)[None])
    assert auto.tuned[runtime]
    ficco.close()


def without_a_profile(rank: int, world: int) -> None:
    """Where nothing is predicted, all schedules are timed once, and the fastest are measured."""
    runtime = opened()
    os.environ["FICCO_MEASURE"] = "0"
    timed: list[int] = []
    fastest = tuning.Turns.fastest

    def counted(self: Any, runs: Any, count: int) -> list[int]:
        places = fastest(self, runs, count)
        timed.extend((len(runs), len(places)))
        return places

    tuning.Turns.fastest = counted  # type: ignore[method-assign]
    try:
        with ficco.tune(schedules=2):
            y = ficco.matmul_all_reduce(draw(rank, 4, 8), torch.ones(8, 3))
    finally:
        tuning.Turns.fastest = fastest  # type: ignore[method-assign]
        del os.environ["FICCO_MEASURE"]
    many, few = timed
    assert many > few == 3, timed
    (found,) = auto.tuned[runtime].values()
    assert len(found["eager"].alternatives) == 2, found
    want = sum((draw(r, 4, 8) for r in range(world)), torch.zeros(4, 8)) @ torch.ones(8, 3)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
    ficco.close()


def one_context_again(rank: int, world: int) -> None:
    """A context can be entered again, and be a decorator; it measures a problem once."""
    runtime = opened()
    x, w = draw(rank, 4, 8), torch.ones(8, 3)
    context = ficco.tune(schedules=1)
    with context:
        ficco.matmul_all_reduce(x, w)
    measured = dict(auto.tuned[runtime])
    assert len(measured) == 1
    with context:
        ficco.matmul_all_reduce(x, w)
    assert dict(auto.tuned[runtime]) == measured
    context(ficco.all_gather_matmul)(x, w)
    assert len(auto.tuned[runtime]) == 2
    with context, ficco.tune(), ExitStack() as stack:
        inner = tuning._sessions[-1]
        stack.enter_context(context)
        stack.close()
        assert tuning._sessions[-1] is inner is not context
    assert not tuning._sessions
    ficco.close()


def narrow_windows(rank: int, world: int) -> None:
    """Schedules that need more than the windows may have are not measured."""
    x, w = draw(rank, 64, 32), torch.ones(32, 8)
    runtime = opened()
    ficco.matmul_all_reduce(x, w, schedule="serial")
    enough = runtime.window_bytes // world
    ficco.close()
    for limit in (enough, 0):  # the latter is not enough for serial
        ficco.limit_windows(limit)
        runtime = opened()
        with ficco.tune():
            y = ficco.matmul_all_reduce(x, w)
        want = sum((draw(r, 64, 32) for r in range(world)), torch.zeros(64, 32)) @ w
        torch.testing.assert_close(y, want, rtol=1e-3, atol=1e-3)
        assert runtime.window_bytes <= limit * world
        assert bool(limit) == bool(auto.tuned.get(runtime))
        ficco.close()
    ficco.limit_windows(None)


def contexts(rank: int, world: int) -> None:
    """What a context has measured outlives it, and an error in it; second runtimes do not.

    An outer context does not measure again what an inner one has measured.
    """
    runtime = opened()
    x, w = draw(rank, 4, 8), torch.ones(8, 3)
    seconds: list[ProcessRuntime] = []
    opened_apart = tuning._opened

    def noted(*given: Any) -> ProcessRuntime:
        seconds.append(opened_apart(*given))
        return seconds[-1]

    tuning._opened = noted
    try:
        with ficco.tune():
            with ficco.tune(schedules=1):
                ficco.matmul_all_reduce(x, w)
                ficco.matmul_all_reduce(x, w)
                assert not seconds[0].window_bytes, "the second runtime is open"
            ficco.matmul_all_reduce(x, w)
            raise KeyError("an error of the user")
    except KeyError:
        pass
    finally:
        tuning._opened = opened_apart
    assert len(seconds) == 1 and not tuning._sessions
    assert len(auto.tuned[runtime]) == 1
    ficco.matmul_all_reduce(x, w)
    assert len(auto.tuned[runtime]) == 1
    ficco.close()
    runtime = opened()
    ficco.matmul_all_reduce(x, w)
    assert runtime not in auto.tuned, "a new group begins with predictions"
    ficco.close()


def one_rank_alone(rank: int, world: int) -> None:
    """If only some ranks measure a call, all ranks get an error, and a reset helps."""
    opened()
    x, w = draw(rank, 4, 8), torch.ones(8, 3)
    ficco.matmul_all_reduce(x, w)
    begin = time.monotonic()
    try:
        if rank == 0:
            with ficco.tune():
                ficco.matmul_all_reduce(x, w)
        else:
            ficco.matmul_all_reduce(x, w, schedule="hetero_fused_1d")
    except ficco.EngineError as error:
        assert rank or "runs another call than rank" in str(error), error
    else:
        raise AssertionError("a call was measured by one rank")
    assert time.monotonic() - begin < 4 * TIMEOUT_S
    dist.barrier()
    ficco.reset()
    with ficco.tune():
        y = ficco.matmul_all_reduce(x, w)
    want = sum((draw(r, 4, 8) for r in range(world)), torch.zeros(4, 8)) @ w
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
    ficco.close()


def unlike_calls(rank: int, world: int) -> None:
    """If ranks measure different calls, all ranks get an error that names both."""
    opened()
    with ficco.tune():
        try:
            ficco.matmul_all_reduce(draw(rank, 4, 8), torch.ones(8, 3 if rank else 5))
        except ficco.EngineError as error:
            assert "rank 1 measures another call than rank 0" in str(error), error
            assert "4x5x" in str(error) and "4x3x" in str(error), error
        else:
            raise AssertionError("two calls were measured as one")
        ficco.matmul_all_reduce(draw(rank, 4, 8), torch.ones(8, 6))
    ficco.close()


def one_cannot_tune(rank: int, world: int) -> None:
    """A rank whose options of tune are wrong tells those that measure; a context is left once."""
    runtime = opened()
    x, w = draw(rank, 4, 8), torch.ones(8, 3)
    ficco.matmul_all_reduce(x, w)
    begin = time.monotonic()
    try:
        with ficco.tune(schedules=4 if rank else 0):
            ficco.matmul_all_reduce(x, w)
    except ficco.FiccoError as error:
        assert isinstance(error, ficco.EngineError) == bool(rank), error
        assert "schedules=0" in str(error), error
        assert time.monotonic() - begin < TIMEOUT_S - 1.0, "peers waited for the timeout"
    else:
        raise AssertionError("one rank alone cannot tune, and the others did")
    dist.barrier()
    ficco.reset()
    context = ficco.tune(schedules=1)
    with context:
        ficco.matmul_all_reduce(x, w)
    try:
        context.__exit__(None, None, None)
    except ficco.InputError as error:
        assert "left more often than entered" in str(error), error
    else:
        raise AssertionError("a context was left twice")
    assert len(auto.tuned[runtime]) == 1
    ficco.close()


def one_refuses(rank: int, world: int) -> None:
    """A rank whose arguments are wrong tells those that measure; then the call is measured."""
    runtime = opened()
    x, w = draw(rank, 4, 8), torch.ones(8, 3)
    ficco.matmul_all_reduce(x, torch.ones(8, 2))
    begin = time.monotonic()
    with ficco.tune():
        try:
            ficco.matmul_all_reduce(x, w if rank else torch.ones(7, 3))
        except ficco.FiccoError as error:
            assert isinstance(error, ficco.EngineError) == bool(rank), error
            assert "w is [7, 3]" in str(error), error
            assert time.monotonic() - begin < TIMEOUT_S - 1.0, "peers waited for the timeout"
        else:
            raise AssertionError("a call that a rank has refused was measured")
        dist.barrier()
        ficco.reset()
        ficco.matmul_all_reduce(x, w)
    assert len(auto.tuned[runtime]) == 1
    ficco.close()


def problems_are_told_apart(rank: int, world: int) -> None:
    """Calls of equal rows but other columns or axes are measured, or predicted, by themselves."""
    runtime = opened()
    x = draw(rank, 4, 8)
    with ficco.tune():
        ficco.all_gather_matmul(x, torch.ones(8, 4))
        ficco.all_gather_matmul(x, torch.ones(8, 400))
        ficco.all_gather_matmul(x, torch.ones(8, 4), bias=torch.ones(4))
        ficco.all_gather_matmul(x, [torch.ones(8, 2), torch.ones(8, 2)])
    assert len(auto.tuned[runtime]) == 4
    ficco.all_gather_matmul(x, torch.ones(4 * world, 5), axes=["contraction"])
    ficco.close()


def folders(rank: int, world: int) -> None:
    """What was measured is kept in a folder; a later group takes it from there."""
    for wrong in (3, "\0", "/dev/null/folder"):
        try:
            with ficco.tune(folder=wrong):  # type: ignore[arg-type]
                raise AssertionError(f"folder={wrong!r} was taken")
        except ficco.InputError as error:
            assert "a folder's path is needed" in str(error), error
    folder = Path(os.environ["TUNED_FOLDER"])
    x, w, found, whole = draw(rank, 4, 8), torch.ones(8, 3), [], ""
    with _warnings() as texts:
        for turn in range(2 + len(BROKEN_FILES)):
            runtime = opened()
            relative = Path(os.path.relpath(folder))
            tuning_to = ficco.tune(folder=relative if rank == 0 else None)  # rank 0 alone uses it
            with contextlib.chdir("/"), tuning_to:
                y = ficco.matmul_all_reduce(x, w)
            want = sum((draw(r, 4, 8) for r in range(world)), torch.zeros(4, 8)) @ w
            torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
            (choices,) = auto.tuned[runtime].values()
            found.append(choices["eager"])
            (file,) = folder.iterdir()
            dist.barrier()
            whole = file.read_text() if turn == 0 else whole
            if rank == 0 and 0 < turn <= len(BROKEN_FILES):
                file.unlink()
                if BROKEN_FILES[turn - 1] == "fifo":
                    os.mkfifo(file)
                else:
                    file.write_text(_broken(BROKEN_FILES[turn - 1], whole))
            ficco.close()
    first, second, *others = found
    assert first.schedule == second.schedule and first.predicted_ms == second.predicted_ms
    assert first.alternatives == second.alternatives
    assert "measured here by ficco.tune" in first.reasons[0], first.reasons
    assert str(file) in second.reasons[0] and "measured by" in second.reasons[0], second.reasons
    for other in others:
        assert "measured here by ficco.tune" in other.reasons[0], other.reasons
    unread = [text for text in texts if "cannot be read as a file of ficco.tune" in text]
    unkept = [text for text in texts if "are not kept" in text]
    assert len(unread) == (len(BROKEN_FILES) if rank == 0 else 0), texts
    # What ficco has not written stays: all but the edited files, and an empty one.
    assert len(unkept) == (len(unread) - len(EDITED_FILES) - 1 if rank == 0 else 0), texts
    assert len(texts) == len(unread) + len(unkept), texts
    assert not texts or any("date, ms, schedules: missing" in text for text in texts), texts


def _broken(how: str, text: str) -> str:
    """Return the text of a broken file: another one, or this one with a wrong entry."""
    table = json.loads(text)
    if how == "huge":  # no floating-point number
        table["ms"]["eager"][0] = 10**400
    elif how == "elsewhere":  # a schedule that is not resolved
        table["schedules"][-1]["grain"] = "world"
    elif how == "twice":
        table["schedules"].append(table["schedules"][-1])
        for times in table["ms"].values():
            times.append(times[-1])
    else:
        return how
    return json.dumps(table)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Yield the texts of warnings in the context."""
    heard = _Heard()
    log.addHandler(heard)
    try:
        yield heard.texts
    finally:
        log.removeHandler(heard)


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def one_fails(rank: int, world: int) -> None:
    """If a rank fails between calls, all ranks are told its reason soon, and make the call."""
    ficco.prepare(timeout_s=60.0)
    (runtime,) = groups.opened(None)
    x, w = draw(rank, 4, 8), torch.ones(8, 3)
    slowest = tuning.Turns._slowest

    def broken(self: Any, own_ms: Any) -> list[float]:
        if rank == 1:
            raise MemoryError("no room for a graph")
        return slowest(self, own_ms)

    tuning.Turns._slowest = broken  # type: ignore[method-assign]
    begin = time.monotonic()
    try:
        with ficco.tune(), _warnings() as texts:
            ficco.matmul_all_reduce(x, w)
    finally:
        tuning.Turns._slowest = slowest  # type: ignore[method-assign]
    assert time.monotonic() - begin < 20.0, "peers waited for the timeout"
    (told,) = texts
    assert told.endswith("rank 1: MemoryError: no room for a graph"), told
    assert runtime not in auto.tuned
    ficco.close()


def main(store: str, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    join_gloo(store, rank, world)
    os.environ["TUNED_FOLDER"] = f"{store}.tuned"
    options_are_checked()
    for check in (
        gradients, models, bags, without_a_profile, narrow_windows, contexts, one_rank_alone,
        one_context_again, unlike_calls, one_refuses, one_cannot_tune,
        problems_are_told_apart, one_fails, folders,
    ):  # fmt: skip
        check(rank, world)
        print(check.__name__, flush=True)
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
