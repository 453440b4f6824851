"""The command lines of tests/gpu: each is parsed, planned and run on the double of the driver."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from double_control import environment
from forking import Forked, ended

sys.path.append(str(Path(__file__).parents[1] / "gpu"))
from command_lines import (
    CALM,
    LIMIT_S,
    Done,
    Line,
    check_document,
    check_refusal,
    check_trace,
    lines,
    profile_lines,
    rows_of,
)

from ficco.cli.arguments import request_from
from ficco.cli.main import parser
from ficco.core.errors import FiccoError
from ficco.lowering import lower
from ficco.operators import OPERATORS
from ficco.verifier import verify

SCRIPT = Path(__file__).with_name("command_on_double.py")
PROFILES = profile_lines()
FULL, SMALL = lines() | PROFILES, lines(603, 57, 71)
# What the double cannot do: hide devices, be out of memory at once, start torchrun's ranks; `host`
# has its own tests, and the default job takes NumPy too long. The others differ from lines that run
# only in the dtype, or in an operator with the same options.
NOT_RUN = {
    "refused hidden", "refused sizes", "torchrun", "host", "default",
    "schedules all_gather_matmul float32", "schedules matmul_reduce_scatter bfloat16",
    "operator all_gather_matmul", "operator matmul_reduce_scatter", "operator matmul_all_to_all",
}  # fmt: skip


def call(folder: Path, line: Line, given: Mapping[str, str], *more: str) -> Done:
    """Run a line in a folder, in processes that are forked with PyTorch imported."""
    environment = {**given, **CALM, **line.environment}
    with (folder / "out.txt").open("w") as out, (folder / "err.txt").open("w") as err:
        started = Forked([SCRIPT, *line.words, *more], out, err, environment, folder)
        (code,) = ended([started], LIMIT_S)
    said = Path(out.name).read_text(), Path(err.name).read_text()
    assert code is not None, f"not done after {LIMIT_S:g} s: {said}"
    return Done(code, *said)


@pytest.mark.parametrize("line", FULL.values(), ids=FULL)
def test_every_line_is_parsed_and_planned(line: Line) -> None:
    args = parser().parse_args([word.lower() if len(word) == 3 else word for word in line.words])
    assert args.command == line.words[0]
    refused = line.code != 0 and not line.environment
    if args.command != "run" or (refused and "sizes" not in line.name):
        return  # these lines run on the double, below
    if args.machine == "found.toml":
        args.machine = "h200x2"
    if args.schedule == "auto":
        args.machine = args.machine or "h200x2"
    engine = "host" if args.machine == "host" else "cuda"
    asked = request_from(args, engine, 2)
    assert asked.schedules
    if "sizes" in line.name or args.schedule == "auto":
        return
    wanted = rows_of(asked.problem.op, engine)
    assert args.schedule != "all" or [s.name for s in asked.schedules] == wanted
    for schedule in asked.schedules:
        assert not verify(lower(asked.problem, schedule)), f"{line.name}, {schedule.name}"


def test_what_a_line_may_not_say_is_refused() -> None:
    """So that the test above can fail: the two words that made lines of tests/gpu stale."""
    words = ["run", "all_to_all_matmul", "--m", "1003", "--splits", "0,900;301,2"]
    with pytest.raises(FiccoError, match="leave --m out"):
        request_from(parser().parse_args([*words, "--ranks", "2"]), "cuda", 2)


def test_lines_that_do_not_run_exist() -> None:
    assert not NOT_RUN - set(SMALL)


def test_the_lines_have_every_operator() -> None:
    assert {line.words[1] for line in FULL.values() if "operator" in line.name} == set(OPERATORS)


@pytest.mark.parametrize("name", [name for name in PROFILES if PROFILES[name].code])
def test_lines_of_a_profile_are_refused(
    double_folder: Path, tmp_path: Path, name: str, torch: Any
) -> None:
    """To measure GPUs needs them; so the lines that are refused run here."""
    (tmp_path / "found.toml").write_text("")
    given = environment(double_folder, devices=2, version=13000)
    line = PROFILES[name]
    done = call(tmp_path, line, given)
    check_refusal(line, done)
    assert (tmp_path / "found.toml").read_text() == ""


@pytest.mark.parametrize("name", [name for name in SMALL if name not in NOT_RUN])
def test_every_line_runs_on_the_double(
    double_folder: Path, tmp_path: Path, name: str, torch: Any
) -> None:
    line = SMALL[name]
    given = environment(double_folder, devices=2, version=13000) | {
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    traced = ("--trace", "trace.json") if name.startswith(("schedules", "serial")) else ()
    done = call(tmp_path, line, given, *traced)
    if line.code:
        check_refusal(line, done)
        assert {path.name for path in tmp_path.iterdir()} == {"out.txt", "err.txt"}
    elif name in ("auto", "explain"):
        assert done.code == 2 and "no profile of" in done.err and "doctor --profile" in done.err
    elif name == "doctor":
        found = {finding["name"]: finding for finding in done.document["findings"]}
        assert done.code == 0 and found["peer access"]["ok"] and found["torch on GPUs"]["ok"]
    elif name == "serial":
        assert done.code == 0 and "has no timeline" in done.out, done.err
        assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []
    else:
        document = check_document(line, done, 1 if name == "one" else 2)
        assert [row["schedule"] for row in document["results"]] == rows_of(document["op"])
        if traced:
            # On a loaded machine a thread may stand between looking at one clock and at the other.
            check_trace(tmp_path / "trace.json", 2, clocks_differ_us=1e5)
