"""Every operator on GPUs: right, again and again, in graphs, and with nothing else on the SMs.

Ranks share GPUs where there are fewer of these: the same runs as on GPUs of their own, but in
turns, so that `a rank a GPU` finds races that `8 ranks` cannot.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from gpus import right

WORLDS = (1, 2, 3, 4, 5, 6, 7, 8)
AT_RANDOM = Path(__file__).with_name("random_worker.py")
GRADIENTS = Path(__file__).parents[1] / "modules" / "gradient_worker.py"


@pytest.mark.parametrize("world", WORLDS)
def test_every_operator_is_right(world: int, shared_gpus: int, tmp_path: Path) -> None:
    right("operators", world, tmp_path, seeds=1)


def test_every_operator_is_right_on_one_hardware_queue(gpus: int, tmp_path: Path) -> None:
    single = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    right("operators", gpus, tmp_path, seeds=1, environment=single)


def test_calls_again_and_again(ranks: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    right("fuzz", ranks, tmp_path, calls=request.config.getoption("--calls"))


def test_tiles_that_programs_share(
    ranks: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    right("shared_tiles", ranks, tmp_path, calls=request.config.getoption("--calls"))


def test_graphs_again_and_again(ranks: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    right("replay", ranks, tmp_path, replays=request.config.getoption("--calls"))


def test_few_rows_that_fill_a_gpu(ranks: int, tmp_path: Path) -> None:
    right("few_rows", ranks, tmp_path, calls=300)


def test_captures_and_windows(ranks: int, tmp_path: Path) -> None:
    right("capture_rules", ranks, tmp_path)


def test_only_named_kernels_run(gpus: int, tmp_path: Path) -> None:
    right("profile", gpus, tmp_path)


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("few_rows", [False, True])
def test_faults(dies: bool, few_rows: bool, ranks: int, tmp_path: Path) -> None:
    right("faults", ranks, tmp_path, dies=dies, few_rows=few_rows, timeout_s=3.0, allowed_s=100.0)


@pytest.mark.parametrize("ahead", [0, 5000])
def test_faults_on_one_hardware_queue(ahead: int, gpus: int, tmp_path: Path) -> None:
    """Also where the host has filled that queue behind the wait, and stands still in a launch."""
    single = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    right(
        "faults", gpus, tmp_path, dies=False, ahead=ahead, timeout_s=3.0, allowed_s=100.0,
        environment=single,
    )  # fmt: skip


@pytest.mark.parametrize("queues", ["1", "8"])
def test_faults_while_a_kernel_is_loaded(queues: str, gpus: int, tmp_path: Path) -> None:
    """Its code comes to the GPU behind the wait, and no copy returns before that is let go."""
    lazily = {"CUDA_MODULE_LOADING": "LAZY", "CUDA_DEVICE_MAX_CONNECTIONS": queues}
    right(
        "faults", gpus, tmp_path, dies=False, loads=True, timeout_s=3.0, allowed_s=100.0,
        environment=lazily,
    )  # fmt: skip


def test_other_kernels_in_the_opposite_order(gpus: int, tmp_path: Path) -> None:
    right("opposite", gpus, tmp_path, rounds=90)


def test_few_rows_where_others_hold_the_multiprocessors(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    right("crowded", ranks, tmp_path, timeout_s=20.0)


def test_windows_opened_while_another_stream_works(ranks: int, tmp_path: Path) -> None:
    right("aside", ranks, tmp_path)


def test_public_functions(ranks: int, tmp_path: Path) -> None:
    right("functions", ranks, tmp_path)


@pytest.mark.parametrize("world", (1, 2, 3, 4, 6, 8))
def test_every_gradient_is_right(world: int, shared_gpus: int, tmp_path: Path) -> None:
    right("cuda", world, tmp_path, worker=GRADIENTS)


@pytest.mark.parametrize("seed", [1, 2])
def test_random_calls_are_right(seed: int, ranks: int, tmp_path: Path) -> None:
    """By every schedule, laid out in every way, between replays, resets and larger windows."""
    right("random", ranks, tmp_path, worker=AT_RANDOM, seed=seed, calls=200)


def test_public_functions_where_launches_block(gpus: int, tmp_path: Path) -> None:
    blocking = {"CUDA_LAUNCH_BLOCKING": "1"}
    right("functions", gpus, tmp_path, environment=blocking, fallback=True)
