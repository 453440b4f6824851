"""Problems that cannot be held are refused before their memory is taken, with both sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ficco
from ficco import _native
from ficco.cli.main import main
from ficco.engine import available_memory
from ficco.operators import OPERATORS, oracle, registry
from ficco.operators.problem import Problem

MIB = 1 << 20


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let the machine have 100 MiB."""
    monkeypatch.setattr(_native, "available_bytes", lambda: 100 * MIB)
    return 100 * MIB


def test_what_is_available_is_no_more_than_the_kernel_says() -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines}
    assert 0 < _native.available_bytes() <= sizes["MemTotal"]


def test_both_sizes_are_said(little: int) -> None:
    available_memory.check_host(little, "so much")
    with pytest.raises(
        MemoryError, match=r"more: 3\.00 GiB requested, but this machine has 100\.00 M"
    ):
        available_memory.check_host(3 << 30, "more")


@pytest.mark.usefixtures("little")
def test_a_node_refuses_results() -> None:
    x, w = np.ones((5000, 1), np.float32), np.ones((1, 5000), np.float32)
    refused = pytest.raises(
        MemoryError, match=r"results of all_gather_matmul.*381\.47 MiB requested"
    )
    with ficco.Node(2) as node, refused:
        node.all_gather_matmul([x, x], [w, w])


@pytest.mark.usefixtures("little")
def test_a_node_refuses_windows_and_stays_usable() -> None:
    x, w = np.ones((8192, 512), np.float32), np.ones((512, 1), np.float32)
    with ficco.Node(2) as node:
        with pytest.raises(MemoryError, match=r"windows and workspaces.*128\.00 MiB requested"):
            node.all_gather_matmul([x, x], [w, w])
        y, _ = node.all_gather_matmul([x[:8], x[:8]], [w, w])
        assert (y == 512).all()


@pytest.mark.usefixtures("little")
def test_the_reserve_of_larger_windows_is_counted() -> None:
    x, w = np.ones((5608, 512), np.float32), np.ones((512, 1), np.float32)
    with ficco.Node(2) as node:
        node.all_gather_matmul([x[:5600], x[:5600]], [w, w])  # needs 88 MiB
        with pytest.raises(MemoryError, match=r"windows and workspaces.*131\.25 MiB requested"):
            node.all_gather_matmul([x, x], [w, w])


@pytest.mark.usefixtures("little")
@pytest.mark.parametrize("op", OPERATORS)
def test_the_command_refuses_before_it_draws_inputs(
    op: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(oracle, "inputs", None)  # nothing is drawn
    sizes = ["--m", "65536", "--n", "8192", "--k", "8192"]
    assert (
        main(["run", op, "--ranks", "4", "--schedule", registry.get(op).usual_schedule, *sizes])
        == 2
    )
    said = capsys.readouterr().err
    assert "requested, but this machine has 100.00 MiB free" in said


@pytest.mark.parametrize("op", OPERATORS)
def test_what_a_command_needs_is_what_inputs_and_exact_results_hold(op: str) -> None:
    problem = Problem.chunked(op, 4, 64, 48, 32, "bfloat16")
    given = oracle.inputs(problem, 0)
    held = sum(array.nbytes for mine in given for array in mine.values())
    for exact in oracle.results(problem, given):
        for each in exact:
            held += each.value.nbytes + each.magnitude.nbytes + 2 * each.value.size
    assert oracle.bytes_needed(problem) == held
