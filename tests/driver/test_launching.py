"""Programs that launch compiled kernels by themselves, on the test double of the driver.

The double runs a function of the host in place of a kernel, with the parameters that a GPU would
get. What a GPU makes of them needs tests/gpu.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from double_control import environment
from forking import run_forked

WORKER = Path(__file__).with_name("launching_worker.py")


def run(folder: Path, place: Path, *scenarios: str, **double: object) -> list[str]:
    """Run scenarios of the worker; return what it says besides."""
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(place / "cache")}
    given = environment(folder, devices=2, **double) | settings
    code, text = run_forked(WORKER, *scenarios, folder=place, environment=given, timeout=100)
    said = text.splitlines()
    right = [f"{scenario} right" for scenario in scenarios]
    assert code == 0 and said[-len(right) :] == right, text[-4000:]
    return said[: -len(right)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels compiled by one test are found by the next."""
    return tmp_path_factory.mktemp("launching")


def test_products_are_right_on_a_shared_queue(
    double_folder: Path, place: Path, torch: object
) -> None:
    assert not run(double_folder, place, "products", single_queue=1)


def test_launches_are_captured_given_up_and_refused(
    double_folder: Path, place: Path, torch: object
) -> None:
    assert not run(double_folder, place, "chained", "graphs", "giving_up", "refusals",
                   "loading_code", "alone")  # fmt: skip


def test_an_older_driver_is_refused(double_folder: Path, place: Path, torch: object) -> None:
    said = run(double_folder, place, "older_driver", version=12030)
    assert len(said) == 2 and all("from CUDA 12.4 on; install a newer" in line for line in said)
