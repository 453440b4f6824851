"""ficco's functions on GPUs' tensors, in processes, on the test double of the driver.

Tensors of the CPU pass for a GPU's (torch_on_double.py), and NumPy multiplies in stream order; all
else is what runs on GPUs: calls that are known, launches by native code, windows, captures,
failures. What each rank holds true is in torch_worker.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from double_control import environment
from forking import Forked, ended

WORKER = Path(__file__).with_name("torch_worker.py")
DEADLINE_S = 120


def run(
    double: Path, folder: Path, world: int, *checks: str, fresh: bool = False, **settings: object
) -> list[str]:
    """Run checks on every rank of a world; each must end well. Return what each says.

    Args:
        double: the folder of the double.
        folder: where the ranks meet.
        world: number of ranks.
        checks: their names.
        fresh: whether ranks are new processes, which end as Python does; else they are forked.
        settings: of the double.
    """
    pytest.importorskip("torch")
    given = environment(double, **{"devices": world, **settings}) | {
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    logs = [(folder / f"rank{rank}.txt").open("w") for rank in range(world)]
    ranks: list[Any] = []
    for rank, log in enumerate(logs):
        words = [str(WORKER), str(folder / "store"), str(rank), str(world), *checks]
        words = [sys.executable, "-X", "faulthandler", *words] if fresh else words
        start = subprocess.Popen if fresh else Forked
        ranks.append(start(words, stdout=log, stderr=subprocess.STDOUT, env=given))
    codes = ended(ranks, DEADLINE_S)
    for log in logs:
        log.close()
    texts = [Path(log.name).read_text() for log in logs]
    said = "".join(f"---- rank {i}\n{text[-3000:]}" for i, text in enumerate(texts))
    assert codes == [0] * world, said
    return texts


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    "check", ["functions", "gradients", "calls_again", "models", "products_between_launches"]
)
def test_functions_are_right(double_folder: Path, tmp_path: Path, check: str, world: int) -> None:
    """Also again, with tensors that are laid out otherwise, after a change of mind; and models."""
    run(double_folder, tmp_path, world, check)


@pytest.mark.parametrize("check", ["functions", "captures"])
def test_streams_may_write_to_peers(
    double_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: str
) -> None:
    """Calls and graphs with the other kind of signals."""
    monkeypatch.setenv("FICCO_SIGNALS", "write")
    run(double_folder, tmp_path, 2, check, peer_writes="done")


def test_a_group_without_signals_falls_back(
    double_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FICCO_SIGNALS", "write")
    run(double_folder, tmp_path, 2, "without_signals", peer_writes="lost")


def test_without_triton_matrices_may_lie_in_any_way(double_folder: Path, tmp_path: Path) -> None:
    run(double_folder, tmp_path, 2, "lying_otherwise")


def test_a_process_may_end_with_its_group_open(double_folder: Path, tmp_path: Path) -> None:
    """Nothing is said about it."""
    for said in run(double_folder, tmp_path, 2, "left_open", fresh=True):
        assert said.splitlines()[-2:] == ["left_open", "right"], said


@pytest.mark.parametrize("world", [1, 2, 5])
def test_random_calls_are_right(double_folder: Path, tmp_path: Path, world: int) -> None:
    """By every schedule, laid out in every way, between replays, resets and larger windows."""
    run(double_folder, tmp_path, world, "at_random")


@pytest.mark.parametrize(
    "check",
    [
        "captures", "limited", "made_ready", "room_is_used", "plain_made_ready",
        "nothing_to_multiply", "diverging", "failures", "refused_by_driver", "one_sided",
        "slow_to_load", "slow_to_open", "product_that_fails", "product_without_launch",
        "interrupted_behind_a_launch", "from_another_device", "second_product_that_fails",
        "at_other_addresses",
    ],
)  # fmt: skip
def test_captures_and_failures(double_folder: Path, tmp_path: Path, check: str) -> None:
    """Graphs of calls, beside calls and larger windows; ranks that do not come, or call others."""
    run(double_folder, tmp_path, 3, check)
