"""The commands on GPUs, as a person or a script calls them.

The lines are those of command_lines.py. Those of the selected tests run side by side, a few at a
time, since most of their time goes to the start of processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from command_lines import (
    Done,
    Line,
    call,
    check_document,
    check_refusal,
    check_trace,
    lines,
    rows_of,
)

AT_ONCE = 4  # lines that run at once; each has up to one process per GPU and one more
LINES = lines()
Result = Callable[[str], tuple[Done, Path]]


def of(*names: str) -> Any:
    """Mark a test with the lines that it takes."""
    return pytest.mark.commands(*names)


def each(begin: str) -> list[Any]:
    """Return a parameter for every line whose name begins so."""
    marks = {True: [pytest.mark.quick], False: []}
    return [
        pytest.param(
            line, id=name.removeprefix(begin).strip(), marks=[of(name), *marks[line.quick]]
        )
        for name, line in LINES.items()
        if name.startswith(begin)
    ]


@pytest.fixture(scope="module")
def result(
    gpus: int, run: object, programs: object, request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Result]:  # fmt: skip
    """What a line returned and printed, and the folder in which it ran.

    With `run` and `programs`, the checks of ranks and the examples have begun, and go on beside the
    lines.
    """
    wanted = dict.fromkeys(
        name
        for item in request.session.items
        for mark in item.iter_markers("commands")
        for name in mark.args
    )
    folders = {name: tmp_path_factory.mktemp("line") for name in wanted}
    executor = ThreadPoolExecutor(AT_ONCE)
    futures: dict[str, Future[Done]] = {}
    for name, folder in folders.items():
        traced = ("--trace", "trace.json") if name.split()[0] in ("schedules", "serial") else ()
        futures[name] = executor.submit(call, folder, LINES[name], *traced)
    try:
        yield lambda name: (futures[name].result(), folders[name])
    finally:
        executor.shutdown(cancel_futures=True)


@pytest.mark.parametrize("line", each("schedules"))
def test_every_schedule_is_right(gpus: int, result: Result, line: Line) -> None:
    done, folder = result(line.name)
    document = check_document(line, done, min(gpus, 8))
    assert document["machine"] == "cuda" and document["dtype"] == line.name.split()[2]
    assert [row["schedule"] for row in document["results"]] == rows_of(document["op"])
    check_trace(folder / "trace.json", min(gpus, 8))


@pytest.mark.parametrize("line", each("operator"))
def test_every_operator_on_two_gpus(result: Result, line: Line) -> None:
    check_document(line, result(line.name)[0], 2)


@of("auto", "explain")
def test_auto_takes_what_is_predicted(result: Result) -> None:
    """On a GPU that has a shipped profile; elsewhere the error says how to make one."""
    done, told = result("auto")[0], result("explain")[0]
    if "no profile of" in done.err:
        assert done.code == 2 and "doctor --profile" in done.err
        return
    assert done.code == 0, done.err
    (row,) = done.document["results"]
    choice = told.document["choice"]
    assert row["ok"] and "auto: " in done.err
    assert (row["schedule"], row["grain"]) == (choice["schedule"], choice["grain"])


@of("default")
def test_the_default_job(result: Result) -> None:
    done, _ = result("default")
    assert done.code == 0, done.err
    assert "m=8192 n=8192 k=8192" in done.out and "bfloat16" in done.out
    assert "engine cuda" in done.out and "WRONG" not in done.out
    assert done.out.count(" right") == len(rows_of("all_gather_matmul"))


@of("one", "serial")
def test_one_gpu_and_serial_alone(result: Result) -> None:
    check_document(LINES["one"], result("one")[0], 1)
    done, folder = result("serial")
    assert done.code == 0 and "has no timeline" in done.out, done.err
    assert json.loads((folder / "trace.json").read_text())["traceEvents"] == []


@of("torchrun")
def test_under_torchrun(result: Result) -> None:
    check_document(LINES["torchrun"], result("torchrun")[0], 2)


@pytest.mark.parametrize("line", each("refused"))
def test_what_cannot_be_is_told(result: Result, line: Line) -> None:
    done, folder = result(line.name)
    check_refusal(line, done)
    assert not list(folder.iterdir())


@of("host")
def test_the_host_engine_runs_beside_gpus(result: Result) -> None:
    done, _ = result("host")
    assert done.code == 0, done.err
    assert (done.document["engine"], done.document["m"]) == ("host", 1024)


@of("doctor")
@pytest.mark.quick
def test_the_doctor_sees_them(gpus: int, result: Result) -> None:
    done, _ = result("doctor")
    found = {finding["name"]: finding for finding in done.document["findings"]}
    assert done.code == 0 and found["CUDA driver"]["ok"]
    assert found["peer access"]["ok"] and found["torch on GPUs"]["ok"]
    assert all(found[f"GPU {device}"]["ok"] for device in range(gpus))
