"""`ficco doctor --profile` on GPUs: the file that it writes, and what its figures say."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from command_lines import call, check_document, check_refusal, profile_lines

from ficco.core.machine import COLLECTIVES, Machine

LINES = profile_lines()
LIMIT_S = 150.0  # two minutes are promised


@pytest.fixture(scope="module")
def measured(gpus: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile of all GPUs here, eight at most."""
    folder = tmp_path_factory.mktemp("profile")
    begin = time.monotonic()
    done = call(folder, LINES["profile"], limit_s=LIMIT_S)
    print(done.err, f"in all {time.monotonic() - begin:.0f} s")
    assert done.code == 0, done.err
    assert "found.toml: machine " in done.out and "time is up" not in done.err
    return folder / "found.toml"


@pytest.fixture(scope="module")
def machine(measured: Path) -> Machine:
    return Machine.named(str(measured))


@pytest.mark.timeout(400)
def test_the_file_is_a_machine(machine: Machine, gpus: int) -> None:
    import torch

    world, device = min(gpus, 8), torch.cuda.get_device_name(0)
    assert machine.rated and not machine.paced and machine.engine == "cuda"
    assert machine.devices == world and machine.device == device
    assert machine.name.endswith(f"x{world}")
    if device == "NVIDIA H200":
        assert machine.name == f"h200x{world}"
    assert machine.units == torch.cuda.get_device_properties(0).multi_processor_count
    for word in ("measured 20", f"torch {torch.__version__}", "driver ", "NCCL ", "ficco "):
        assert word in machine.source


def test_gemms_are_plausible(machine: Machine) -> None:
    times = dict(machine.gemms)
    assert set(times) == {"bfloat16", "float32"}
    assert len(times["bfloat16"].points) > 500 and len(times["float32"].points) > 40
    rates = {
        dtype: [2e-6 * m * n * k / us for m, n, k, us in found.points]
        for dtype, found in times.items()
    }  # TFLOP/s
    assert 20 < max(rates["bfloat16"]) < 3000 and max(rates["float32"]) < max(rates["bfloat16"])
    small, large = (machine.gemm_us(m, 4096, 4096, "bfloat16") for m in (256, 16384))
    assert 1 < small < large / 8
    if machine.device == "NVIDIA H200":
        assert 550 < max(rates["bfloat16"]) < 990 and 30 < max(rates["float32"]) < 70


def test_links_are_plausible(machine: Machine) -> None:
    link, peers = machine.link, machine.devices - 1
    rates = [rate for _, rate in link.gbps]
    assert 0 < link.latency_us < 50 and 1 < max(rates) < 2000
    assert link.gbps[0][0] == 4096 and link.gbps[-1][0] == 256 << 20
    assert link.transfer_us(4096) < link.transfer_us(1 << 20) < link.transfer_us(1 << 26)
    for curve in (link.out_gbps, link.in_gbps):
        assert [count for count, _ in curve.points] == list(range(1, peers + 1))
        assert all(0.2 * link.peak_gbps < rate < 1.2 * peers * link.peak_gbps
                   for _, rate in curve.points)  # fmt: skip
    rows = [rate for _, rate in link.row_gbps.points]
    assert rows[-1] > 0.9 * rows[0] and max(rows) < 1.2 * link.peak_gbps
    if machine.device == "NVIDIA H200":
        assert link.per == "port" and 300 < link.peak_gbps < 460
        assert 3000 < machine.memory_gbps < 4900


def test_collectives_and_costs_are_plausible(machine: Machine) -> None:
    assert {name for name, _ in machine.collectives} == set(COLLECTIVES)
    for name, curve in machine.collectives:
        times = [us for _, us in curve.points]
        assert len(times) == 7 and times[0] > 1 and times[-1] > 20 * times[0], name
        bytes_out, us = curve.points[-1]
        assert 0.2 * machine.link.peak_gbps < bytes_out / us / 1e3 < 1.3 * machine.link.peak_gbps
    costs = machine.costs
    for name in ("signal_us", "clear_us", "wait_us"):
        assert 0.02 < getattr(costs, name) < 20, name
    assert costs.raise_us < 30 and costs.launch_us < 20 and costs.call_us < 500
    assert 0.5 < costs.host_launch_us < 100 and 5 < costs.host_serial_us < 1000
    assert costs.host_call_us + costs.host_copy_us + costs.host_words_us > 1
    for name in ("gemm_beside_copies", "copies_beside_gemm", "gemm_beside_collective",
                 "collective_beside_gemm"):  # fmt: skip
        assert 1 <= getattr(costs, name) < 4, name


def test_gemms_in_pieces_lose(machine: Machine) -> None:
    assert {entry.cut for entry in machine.pieces} == {"rows", "columns"}
    for entry in machine.pieces:
        assert all(0.8 < ratio < 10 for _, ratio in entry.ratio.points), entry
    rows = [entry for entry in machine.pieces if entry.cut == "rows"]
    assert len(rows) == 3 and all(entry.ratio.at(32) > entry.ratio.at(2) - 0.05 for entry in rows)


def test_it_is_run_on_and_not_written_over(measured: Path, gpus: int) -> None:
    line = LINES["profile run"]
    check_document(line, call(measured.parent, line), min(gpus, 8))
    before = measured.read_text()
    check_refusal(LINES["profile again"], call(measured.parent, LINES["profile again"]))
    assert measured.read_text() == before
