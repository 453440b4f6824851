"""Runs ficco.device in Triton's interpreter, a process per rank.

TRITON_INTERPRET=1 python interpreted_worker.py signals|barriers|mailboxes|products|late ...
"""

# ruff: noqa: E402 (the path comes before what is found by it)

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.with_name("kernels")), str(HERE.parents[1] / "examples")]

import embedding_all_to_all
import gemv_all_reduce
import numpy as np
import torch
import triton.language as tl
from forked_ranks import forked
from interpreting import make_ready
from small_kernels import (
    DTYPES,
    all_meet,
    astray,
    compare,
    delayed_sum,
    exchange,
    pull_around,
    push_around,
)
from triton.runtime.errors import InterpreterError

from ficco import device as fd
from ficco.core.errors import InputError, TimeoutExceeded

CALLS = 100
LIMIT_S = 60.0


def signals() -> None:
    """Data go around and around; each call finds new data, and waits for the reader."""
    for world, dtype in ((1, DTYPES[0]), (2, DTYPES[1]), (3, DTYPES[2]), (8, DTYPES[0])):
        windows = fd.local_windows(world, 700, dtype, signals=2, timeout_s=LIMIT_S)
        calls = CALLS if world == 2 else 6

        def ranks(rank: int, windows=windows, world=world, calls=calls, dtype=dtype) -> None:
            mine, draw = windows[rank], random.Random(rank)
            for call in range(calls):
                if draw.random() < 0.2:
                    time.sleep(0.01)
                count = 1 + (call * 97) % 700
                source = torch.arange(count).add(rank * 7 + call).remainder(97).to(dtype)
                out = torch.full((count + 1,), torch.nan, dtype=dtype)
                push_around[(1,)](mine.tensor, mine.signals, source, out, mine.table, count, call,
                                  world)  # fmt: skip
                want = torch.arange(count).add((rank - 1) % world * 7 + call).remainder(97)
                assert torch.equal(out[:count], want.to(dtype)), f"rank {rank}, call {call}"
                assert out[count] == 2
            mine.check()

        forked(world, ranks)


def stores() -> None:
    """Rows go from every rank to every rank, by a program for each."""
    for world, dtype, cols in ((1, DTYPES[1], 5), (4, DTYPES[2], 301), (5, DTYPES[0], 64)):
        windows = fd.local_windows(world, (world, cols), dtype, signals=world, timeout_s=LIMIT_S)
        torch.manual_seed(world)
        given = torch.randn(world, world, cols).to(dtype)

        def ranks(rank: int, windows=windows, world=world, given=given) -> None:
            mine, out = windows[rank], torch.full_like(given[0], torch.nan)
            exchange[(world,)](mine.tensor, mine.signals, given[rank], out, mine.table, world,
                               given.shape[2], world, 128)  # fmt: skip
            mine.check()
            assert torch.equal(out, given[:, rank]), f"rank {rank}: {out}"
            assert not mine.signals.any()

        forked(world, ranks)


def barriers() -> None:
    """Peers read what was written before a barrier, and not what is written after the next."""
    for world in (1, 2, 3, 7):
        windows = fd.local_windows(world, 200, torch.float32, signals=8 + world, timeout_s=LIMIT_S)
        calls = 60 if world == 2 else 5

        def ranks(rank: int, windows=windows, world=world, calls=calls) -> None:
            mine, draw = windows[rank], random.Random(rank)
            for call in range(calls):
                if draw.random() < 0.3:
                    time.sleep(0.01)
                source = torch.arange(200.0) + 1000 * rank + call
                out = torch.full((201,), torch.nan)
                pull_around[(1,)](mine.tensor, source, out, mine.table, 200, world)
                assert torch.equal(
                    out[:200], torch.arange(200.0) + 1000 * ((rank + 1) % world) + call
                )
                assert out[200] == 2
            mine.check()
            assert not mine.signals[:8].any() and (mine.signals[8:] == 2 * calls).all()

        forked(world, ranks)


def mailboxes() -> None:
    """Sums of all ranks have the same bits, of infinities and zeros, too; -0 is sent as 0."""
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-38, -4.59e-41])
    for world, dtype, rows, cols, calls in (
        (1, DTYPES[0], 1, 6, 3), (2, DTYPES[1], 2, 133, CALLS), (3, DTYPES[2], 3, 50, 9),
        (8, DTYPES[0], 1, 40, 4),
    ):  # fmt: skip
        windows = fd.local_windows(
            world, (2, world, rows, cols), dtype, mailbox=True, timeout_s=LIMIT_S
        )

        def ranks(
            rank: int, windows=windows, world=world, dtype=dtype, rows=rows, cols=cols, calls=calls
        ) -> None:
            mine, delays = windows[rank], random.Random(rank)
            for call in range(calls):
                if delays.random() < 0.1:
                    time.sleep(0.02)
                torch.manual_seed(call)
                every = torch.randn(world, rows, cols).to(dtype)
                every[0, 0, : odd.numel()], every[1:, 0, : odd.numel()] = odd.to(dtype), 0
                y = torch.full((rows, cols), torch.nan, dtype=dtype)
                delayed_sum[(-(-cols // 64),)](
                    every[rank], y, mine.tensor, mine.table, rows, cols, world, 4, 64
                )
                want = every[0].float()
                for part in every[1:]:
                    want = want + part.float()
                near = {"rtol": torch.finfo(dtype).eps, "atol": torch.finfo(dtype).tiny}
                about = f"rank {rank} of {world}, call {call}"
                assert torch.allclose(y.float(), want, **near), about
            mine.check()

        forked(world, ranks)
        for mine in windows:
            vacant = fd.local_windows(1, mine.tensor.shape, dtype, mailbox=True)[0]
            assert torch.equal(mine.tensor.view(torch.uint8), vacant.tensor.view(torch.uint8))


def late() -> None:
    """A rank that comes late is waited for; one that never comes is reported, without a hang."""
    windows = fd.local_windows(3, (2, 3, 2, 70), torch.float32, mailbox=True, timeout_s=LIMIT_S)

    def ranks(rank: int) -> None:
        if rank == 2:
            time.sleep(0.7)
        x, y, begin = torch.full((2, 70), float(rank)), torch.empty(2, 70), time.monotonic()
        mine = windows[rank]
        delayed_sum[(2,)](x, y, mine.tensor, mine.table, 2, 70, 3, 4, 64)
        mine.check()
        assert (y == 3).all() and (rank == 2 or time.monotonic() - begin > 0.4)

    forked(3, ranks)


def _refused(missing: str, window: fd.Window, limit_s: float) -> None:
    try:
        window.check()
    except TimeoutExceeded as error:
        assert error.signal == missing and error.rank == window.rank, error
        assert error.seconds == limit_s and "reset" in str(error)
        return
    raise AssertionError("nothing was reported")


def failures() -> None:
    out = torch.full((12,), -1, dtype=torch.int32)
    (window,) = fd.local_windows(1, 1, torch.float32, signals=3, timeout_s=1.0)
    window.signals.fill_(5)
    begin = time.monotonic()
    compare[(1,)](window.signals, out, window.table)
    lasted = time.monotonic() - begin
    assert 1.0 < lasted < 4.0, f"each wait took the time limit: {lasted:.1f} s"
    assert out.tolist() == [1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 1], out
    _refused("signal 2", window, 1.0)
    window.reset()
    window.check()
    assert not window.signals.any()

    alone, _ = fd.local_windows(2, (3, 2, 1, 4), torch.bfloat16, signals=6, timeout_s=0.3)
    for _ in range(2):
        y = embedding_all_to_all.lookup_and_exchange(
            torch.ones(1, 5, 4).bfloat16(), torch.zeros(1, 6, 2, dtype=torch.int64), alone
        )
        assert y.isnan().all(), "something looks like a result"
        _refused("signal 3", alone, 0.3)  # the other rank has not entered
        alone.tensor.zero_()

    first, second = fd.local_windows(2, 1, torch.float32, signals=2, timeout_s=0.2)
    all_meet[(1,)](out, first.table, 2)
    assert out[0] == 0
    _refused("signal 1", first, 0.2)
    second.check()

    pair = fd.local_windows(2, (2, 2, 2, 70), torch.bfloat16, mailbox=True, timeout_s=2.5)
    first, second = pair
    x, y = torch.ones(2, 70).bfloat16(), torch.zeros(2, 70).bfloat16()

    def call() -> None:
        delayed_sum[(2,)](x, y.zero_(), first.tensor, first.table, 2, 70, 2, 4, 64)

    begin = time.monotonic()
    call()
    assert 2.5 < time.monotonic() - begin < 15.0 and y.isnan().all()
    _refused("block 1 of a mailbox", first, 2.5)
    sent = second.tensor.clone()
    second.tensor.view(torch.int16).fill_(3)  # the rank may still be in the call before
    call()
    assert y.isnan().all() and (second.tensor.view(torch.int16) == 3).all(), "stored after failure"
    assert (sent[0, 0, :, :64] == 1).all()  # the second program found the failure
    for each in pair:
        each.reset()

    def again(rank: int) -> None:
        delayed_sum[(2,)](x, y, pair[rank].tensor, pair[rank].table, 2, 70, 2, 4, 64)
        pair[rank].check()
        assert (y == 2).all()

    forked(2, again)


def products() -> None:
    """The kernel of examples/gemv_all_reduce.py, against float64."""
    for world, m, n, k, dtype in (
        (1, 1, 37, 41, DTYPES[0]), (2, 1, 130, 300, DTYPES[2]), (3, 5, 77, 65, DTYPES[1]),
        (4, 8, 50, 129, DTYPES[0]), (8, 2, 33, 20, DTYPES[2]),
    ):  # fmt: skip
        windows = fd.local_windows(world, (2, world, m, n), dtype, mailbox=True, timeout_s=LIMIT_S)
        kept = fd.local_windows(world, (m, n), dtype)

        def ranks(
            rank: int, windows=windows, kept=kept, world=world, size=(m, n, k), dtype=dtype
        ) -> None:
            m, n, k = size
            for call in range(3):
                torch.manual_seed(call)
                x, w = torch.randn(world, m, k).to(dtype), torch.randn(world, n, k).to(dtype)
                y = kept[rank].tensor.fill_(torch.nan)
                gemv_all_reduce.matmul_all_reduce(x[rank], w[rank], windows[rank], y)
                want = torch.einsum("rmk,rnk->mn", x.double(), w.double())
                bound = (world + 2) * torch.finfo(dtype).eps * float(want.abs().max() + 4)
                error = float((y.double() - want).abs().max())
                assert error <= bound, f"rank {rank} of {world}, {size}: {error:.2e} > {bound:.2e}"
            windows[rank].check()

        forked(world, ranks)
        for other in kept[1:]:
            assert torch.equal(other.tensor, kept[0].tensor), "ranks have different bits"


def embeddings() -> None:
    """The kernel of examples/embedding_all_to_all.py, against float64."""
    for world, count, bags, lookups, dim, dtype in (
        (1, 2, 3, 4, 16, DTYPES[2]), (2, 3, 5, 9, 12, DTYPES[0]), (3, 1, 9, 1, 40, DTYPES[1]),
        (5, 2, 1, 17, 7, DTYPES[2]), (8, 1, 2, 3, 33, DTYPES[0]),
    ):  # fmt: skip
        shape = (bags, world, count, dim)
        windows = fd.local_windows(world, shape, dtype, signals=3 * world, timeout_s=LIMIT_S)

        def ranks(
            rank: int, windows=windows, world=world, sizes=(count, bags, lookups, dim), dtype=dtype
        ) -> None:
            (count, bags, lookups, dim), delays = sizes, random.Random(rank)
            for call in range(4):
                if delays.random() < 0.3:
                    time.sleep(0.05)
                torch.manual_seed(call)
                tables = torch.randn(world, count, 20, dim).to(dtype)
                kind = torch.int64 if call % 2 else torch.int32
                indices = torch.randint(20, (world, count, world * bags, lookups), dtype=kind)
                y = embedding_all_to_all.lookup_and_exchange(
                    tables[rank], indices[rank], windows[rank]
                )
                own = indices[:, :, rank * bags : (rank + 1) * bags].long()
                picked = [
                    tables[r, t].double()[own[r, t]].sum(1)
                    for r in range(world)
                    for t in range(count)
                ]
                error = float((y.double() - torch.cat(picked, 1)).abs().max())
                bound = torch.finfo(dtype).eps * float(4 * lookups)
                assert error <= bound, f"rank {rank} of {world}, call {call}: {error:.2e}"
            windows[rank].check()

        forked(world, ranks)


def declared() -> None:
    """Programs raise and wait for what the embedding example declares, in that order."""
    world, programs = 3, 3
    windows = fd.local_windows(
        world, (20, world, 2, 4), torch.float32, signals=3 * world, timeout_s=LIMIT_S
    )
    original_signal, original_wait = fd.signal, fd.wait

    def ranks(rank: int) -> None:
        mine, made = windows[rank], [list[fd.Raise | fd.Wait]() for _ in range(programs)]

        def number(word: Any) -> int:
            return (word.handle.data.item() - mine.signals.data_ptr()) // 4

        def signal(word: Any, value: Any, op: str, pe: Any, window: Any) -> None:
            step = fd.Raise(int(pe.handle.data.item()), number(word), int(value.handle.data.item()))
            made[int(tl.program_id(0).handle.data.item())].append(step)
            original_signal(word, value, op, pe, window)

        def wait(word: Any, cmp: str, value: Any, window: Any) -> Any:
            wanted = value if isinstance(value, int) else int(value.handle.data.item())
            made[int(tl.program_id(0).handle.data.item())].append(fd.Wait(number(word), wanted))
            return original_wait(word, cmp, value, window)

        fd.signal, fd.wait = signal, wait
        embedding_all_to_all.lookup_and_exchange(
            torch.ones(2, 5, 4), torch.zeros(2, world * 20, 3, dtype=torch.int64), mine
        )
        mine.check()
        for program, steps in enumerate(made):
            want = list(embedding_all_to_all.steps(rank, program, world, programs))
            assert steps == want, f"rank {rank}, program {program}: {steps} instead of {want}"

    forked(world, ranks)
    for resident in (1, 2, None):
        given = {"world": world, "programs": programs, "resident": resident}
        assert not fd.check(
            lambda *place: embedding_all_to_all.steps(*place, world, programs), **given
        )


def astrays() -> None:
    """A peer, an element or a signal that does not exist is refused; nothing is written."""
    windows = fd.local_windows(2, 12, torch.float32, signals=3, timeout_s=1.0)
    mails = fd.local_windows(2, 12, torch.float32, mailbox=True, timeout_s=0.2)
    mine, mail = windows[0], mails[0]
    own, out = torch.arange(1.0, 17.0), torch.zeros(1, dtype=torch.int32)

    def call(what: str, pe: int, first: int, count: int) -> None:
        astray[(1,)](mine.tensor, mine.signals, mail.tensor, own, out, mine.table, mail.table,
                     what, pe, first, count)  # fmt: skip

    def refused(what: str, pe: int, first: int, count: int, words: str) -> None:
        before = [(each.tensor.clone(), each.signals.clone()) for each in (*windows, *mails)]
        try:
            call(what, pe, first, count)
        except InterpreterError as error:
            text, name = str(error.__cause__), what.removeprefix("mailbox.")
            assert isinstance(error.__cause__, InputError), error.__cause__
            assert text.startswith(f"rank 0, {name} in astray (small_kernels.py, line "), text
            assert words in text, text
        else:
            raise AssertionError(f"{what} {pe} {first} {count} was not refused")
        for each, (data, signals) in zip((*windows, *mails), before, strict=True):
            assert torch.equal(each.tensor.view(torch.int32), data.view(torch.int32))
            assert torch.equal(each.signals, signals)

    sends = ("put", "get", "store", "load", "remote_ptr", "signal", "put_signal", "mailbox.put")
    for what in sends:
        for pe in (2, -1, 63):
            refused(what, pe, 0, 1, f"pe={pe}: the window has the ranks 0 to 1")
    for what in ("put", "get", "store", "load", "mailbox.put"):
        words = "elements 8 to 12 of rank 1's data, 5 in length; the data have 12 elements of fp32"
        refused(what, 1, 8, 5, words)
        refused(what, 1, -1, 3, "elements -1 to 1 of rank 1's data")
        call(what, 1, 8, 4)
    refused("put", 1, 0, -4, "nelems=-4")
    refused("put_signal", 1, 0, 13, "elements 0 to 12 of rank 1's data")
    for what in ("signal", "put_signal", "wait"):
        for first in (3, -1):
            about = f"signal {first} of rank {0 if what == 'wait' else 1}: the window has 3 signals"
            refused(what, 1, first, 1, about)
        call(what, 1, 2, 0)
    refused("barrier", 0, 2, 2, "signals 2 to 3 of rank 0: the window has 3 signals")
    refused("barrier", 0, 0, 3, "WORLD=3: the window has 2 ranks")
    refused("mailbox.take_sum", 0, 3, 3, "elements 3 to 13 of rank 0's data")
    call("mailbox.take_sum", 0, 0, 3)
    assert (windows[1].tensor[8:] == own[:4]).all() and windows[1].signals.tolist() == [0, 0, 1]


def refusals() -> None:
    def refused(words: str, **changed: object) -> None:
        given = {"world": 2, "shape": 4, "dtype": torch.float32} | changed
        try:
            fd.local_windows(**given)
        except InputError as error:
            assert words in str(error), error
            return
        raise AssertionError(f"{changed} was not refused")

    refused("world=0", world=0)
    refused("world=65", world=65)
    refused("every size must be 1 or more", shape=(3, 0))
    refused("shape=0: a whole number of 1 or more", shape=0)
    refused("shape=True: a whole number of 1 or more", shape=True)
    refused("shape[0]=2.7: a whole number", shape=(2.7, 3))
    refused("shape[1]=True: a whole number", shape=(2, True))
    refused("shape=2.5: a list of whole numbers", shape=2.5)
    refused("shape='abc': a list of whole numbers", shape="abc")
    refused("a torch.dtype is needed", dtype="float32")
    refused("a mailbox holds float32, float16 or bfloat16", dtype=torch.int32, mailbox=True)
    refused("signals=-1", signals=-1)
    refused("mailbox='x'", mailbox="x")
    refused(" free; smaller sizes or fewer ranks need less", shape=(2**40, 2**40))
    refused("timeout_s=0", timeout_s=0)
    for shape, sizes in ((4, (4,)), (np.int64(4), (4,)), ([np.int32(2), 3], (2, 3))):
        assert fd.local_windows(1, shape, torch.int32)[0].tensor.shape == sizes
    (window,) = fd.local_windows(1, 4, torch.int32)
    with window:
        assert window.table.dtype == torch.int64
    window.close()
    for use in (lambda: window.table, window.check, window.reset):
        try:
            use()
        except InputError as error:
            assert "closed" in str(error), error
        else:
            raise AssertionError("a closed window is used")


if __name__ == "__main__":
    make_ready()
    for subject in sys.argv[1:]:
        begun = time.monotonic()
        globals()[subject]()
        print(f"{subject}: right, {time.monotonic() - begun:.1f} s")
