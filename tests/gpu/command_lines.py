"""The command lines of tests/gpu, in one table, and the checks of what they print.

tests/gpu runs these lines on GPUs. tests/driver/test_gpu_command_lines.py parses, plans and runs
the same lines on the test double of the driver, so that a line cannot go stale unnoticed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ficco.lowering.sending import sends
from ficco.operators import registry
from ficco.plan.schedule import Schedule

__all__ = [
    "COMMAND", "TORCHRUN", "Done", "Line", "call", "check_document", "check_refusal",
    "check_trace", "lines", "profile_lines", "rows_of",
]  # fmt: skip

COMMAND = (sys.executable, "-P", "-m", "ficco")
TORCHRUN = (
    sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "ficco",
)  # fmt: skip
LIMIT_S = 90.0
CALM = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
_NOTHING: Mapping[str, str] = MappingProxyType({})
_KEYS = {
    "op", "m", "n", "k", "ranks", "dtype", "engine", "machine", "paced", "link_gbps", "results",
    "simulated",
}  # fmt: skip


class Line(NamedTuple):
    """A command line, and how it ends.

    Attributes:
        name: of the line in the table.
        words: what follows `ficco`.
        code: the exit code.
        said: what stderr has, where the line is refused.
        environment: variables that are set in addition.
        torchrun: whether torchrun starts it.
        quick: whether the quick selection runs it.
    """

    name: str
    words: tuple[str, ...]
    code: int = 0
    said: str = ""
    environment: Mapping[str, str] = _NOTHING
    torchrun: bool = False
    quick: bool = False


class Done(NamedTuple):
    """What a line returned and printed."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document on stdout."""
        found: dict[str, Any] = json.loads(self.out)
        return found


def lines(m: int = 1003, n: int = 517, k: int = 1031) -> dict[str, Line]:
    """Return the lines that need no file, by name; most have the sizes that are given."""
    rows = ("--m", str(m))
    sizes = ("--n", str(n), "--k", str(k), "--iters", "2")
    odd = (*rows, *sizes)
    two = ("--engine", "cuda", "--ranks", "2", "--json")
    large = ("--m", "16384", "--n", "4096", "--k", "8192", "--ranks", "2")
    # `--splits` give the number of rows, so that `--m` is left out beside them.
    unlike = {
        "matmul_all_reduce": rows,
        "all_to_all_matmul": ("--splits", "0,900;301,2"),
        "matmul_all_to_all": ("--splits", "0,900;0,0"),
        "embedding_all_to_all": rows,
        "all_gather_matmul": (*rows, "--rows", f"0,{m}"),
        "matmul_reduce_scatter": (*rows, "--rows", f"{m},0"),
        "dispatch_matmul": (*rows, "--rows", f"0,{m}"),
        "matmul_combine": rows,
    }
    found = [
        *(
            Line(f"schedules {op} {dtype}", ("run", op, *odd, "--dtype", dtype, "--json"))
            for op in ("all_gather_matmul", "matmul_reduce_scatter")
            for dtype in ("bfloat16", "float32")
        ),
        *(
            Line(f"operator {op}", ("run", op, *sizes, *more, *two), quick="splits" in more[0])
            for op, more in unlike.items()
        ),
        *(  # on CPUs, where doubles of GPUs are, PyTorch rounds 16-bit means twice
            Line(
                f"bags {mode} {index_dtype}",
                ("run", "embedding_all_to_all", *rows, *sizes, *two, "--mode", mode,
                 "--index-dtype", index_dtype, "--dtype", "float32"),
            )
            for mode, index_dtype in (("mean", "int32"), ("weighted", "int64"))
        ),
        Line("default", ("run", "--iters", "2")),
        Line("one", ("run", *odd, "--engine", "cuda", "--ranks", "1", "--json")),
        Line("serial", ("run", *odd, "--schedule", "serial")),
        Line(
            "torchrun", ("run", *(word.upper() if word in ("--m", "--n", "--k") else word
                         for word in odd), "--json"),
            torchrun=True,
        ),
        Line("auto", ("run", *large, "--iters", "2", "--schedule", "auto", "--json")),
        Line("explain", ("explain", *large, "--regime", "synchronized", "--json")),
        Line("host", ("run", "--iters", "1", "--machine", "host", "--json")),
        Line("doctor", ("doctor", "--json"), quick=True),
        Line("refused ranks", ("run", *odd, "--ranks", "60"), 2, "--ranks 60: there are"),
        Line("refused schedule", ("run", *odd, "--schedule", "one_shot_sm"), 2,
             "shots='two', as in gather_sm"),
        Line("refused compute", ("run", *odd, "--compute", "numpy"), 2, "--compute numpy"),
        Line("refused blocking", ("run", *odd, "--engine", "cuda"), 1,
             "CUDA_LAUNCH_BLOCKING is set", {"CUDA_LAUNCH_BLOCKING": "1"}),
        Line("refused hidden", ("run", *odd, "--engine", "cuda"), 2, "--engine cuda",
             {"CUDA_VISIBLE_DEVICES": ""}),
        Line("refused sizes", ("run", *odd, "--n", "4000000", "--k", "4000000"), 2,
             "not enough memory"),
        *(
            Line(f"refused profile of {ranks}",
                 ("doctor", "--profile", "none.toml", "--ranks", str(ranks)), 2, f"--ranks {ranks}")
            for ranks in (1, 60)
        ),
    ]  # fmt: skip
    return {line.name: line for line in found}


def profile_lines(file: str = "found.toml") -> dict[str, Line]:
    """Return the lines of `ficco doctor --profile`, and of a run on the profile, by name."""
    run = ("run", "--machine", file, "--m", "1024", "--n", "512", "--k", "512", "--iters", "1")
    found = [
        Line("profile", ("doctor", "--profile", file)),
        Line("profile run", (*run, "--json")),
        Line("profile again", ("doctor", "--profile", file), 2, "the file exists"),
    ]  # fmt: skip
    return {line.name: line for line in found}


def call(
    folder: Path, line: Line, *more: str, limit_s: float = LIMIT_S,
    command: tuple[str, ...] | None = None, environment: Mapping[str, str] | None = None,
) -> Done:  # fmt: skip
    """Run a line in a folder; leave none of its processes behind.

    Args:
        folder: where it runs.
        line: what runs.
        more: words in addition, such as the name of a file in the folder.
        limit_s: after which it is ended, and AssertionError says so.
        command: starts `ficco`, in place of this Python's module or torchrun.
        environment: the whole environment, in place of this process's.
    """
    given = {**(environment or os.environ), **CALM, **line.environment}
    begin = command or (TORCHRUN if line.torchrun else COMMAND)
    with subprocess.Popen(
        [*begin, *line.words, *more], env=given, cwd=folder, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as started:  # fmt: skip
        try:
            out, err = started.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)  # the ranks are of its session
            out, err = started.communicate()
            raise AssertionError(
                f"`ficco {' '.join(line.words)}` did not end within {limit_s:g} s: "
                f"{out[-2000:]} {err[-4000:]}"
            ) from None
    return Done(started.returncode, out, err)


def check_refusal(line: Line, done: Done) -> None:
    """Check a line that is refused: its code, what it says, and that it says it once."""
    assert done.code == line.code, done.err
    assert done.out == "" and line.said in done.err and "Traceback" not in done.err, done.err
    if line.code == 1:
        assert done.err.count(line.said) == 1, done.err


def check_document(line: Line, done: Done, ranks: int) -> dict[str, Any]:
    """Check the document of `run --json` on GPUs, of which every result is right; return it."""
    assert done.code == line.code == 0, done.err
    document = done.document
    assert set(document) == _KEYS
    assert document["engine"] == "cuda" and document["ranks"] == ranks, document
    assert (document["paced"], document["link_gbps"]) == (False, None)
    assert document["results"]
    for row in document["results"]:
        assert row["ok"], row
        assert row["overlap_ms"] > 0 and row["ideal_ms"] > 0 and row["serial_ms"] > 0, row
        # Kernels return rows of experts without copies.
        if ranks > 1 and "--splits" not in line.words and "matmul_combine" not in line.words:
            assert (row["copies"] > 0) == (row["bytes"] > 0) == (row["schedule"] != "serial"), row
    assert "EMULATED" not in done.err
    return document


def rows_of(op: str, engine: str = "cuda") -> list[str]:
    """Return the schedules that `--schedule all` runs for many rows, in order."""
    if engine == "host":
        flow = registry.get(op).flow
        return [name for name in rows_of(op) if not sends(Schedule.named(name), flow)]
    none = ("gated_1d", "uniform_fused_2d") if op == "embedding_all_to_all" else ()
    names = [name for name in Schedule.names(op) if name not in none]
    return [name for name in names if not Schedule.named(name).for_few_rows]


def check_trace(path: Path, ranks: int, clocks_differ_us: float = 0.0) -> None:
    """Check a trace of all ranks on one clock, which may be told apart by so much."""
    trace = json.loads(path.read_text())
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == set(range(ranks))
    kinds = {event["cat"] for event in slices}
    fastest = trace["otherData"]["title"].split()[1]  # of the schedules: its times are there
    assert "gemm" in kinds, (fastest, kinds)
    assert ("copy" in kinds) != (Schedule.named(fastest).transport == "sm"), (fastest, kinds)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in slices)
    # Ranks are in the call together.
    starts = {rank: min(e["ts"] for e in slices if e["pid"] == rank) for rank in range(2)}
    ends = {rank: max(e["ts"] + e["dur"] for e in slices if e["pid"] == rank) for rank in range(2)}
    assert starts[0] < ends[1] + clocks_differ_us and starts[1] < ends[0] + clocks_differ_us
