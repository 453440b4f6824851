"""`ficco doctor --profile` on a machine without GPUs, and what it refuses before it measures."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ficco
from ficco.cli import engine_choice, profile
from ficco.cli.main import main
from ficco.core.dtypes import DTYPES
from ficco.core.machine import Costs, Machine


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let commands of this process see so many GPUs; none, unless a test says otherwise."""

    def seen(devices: int, trouble: str = "") -> None:
        monkeypatch.setattr(
            engine_choice, "gpus", lambda *asked: engine_choice.Gpus(devices, trouble)
        )

    seen(0, "libcuda.so.1 not found")
    return seen


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of the host engine with two ranks, of as many GEMMs as a short time allows."""
    from ficco.measure.profiling.host import rig

    target = tmp_path_factory.mktemp("profile") / "desk.toml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_choice, "gpus", lambda *asked: engine_choice.Gpus(0, "none"))
        patch.setattr(rig, "THOROUGH", rig.THOROUGH._replace(budget_s=0.3))
        assert main(["doctor", "--profile", str(target), "--ranks", "2"]) == 0
    return target


def test_the_file_is_a_machine(measured: Path) -> None:
    machine = Machine.named(str(measured))
    assert (machine.name, machine.engine, machine.devices) == ("desk", "host", 2)
    assert machine.rated and not machine.paced and machine.paced_link is None
    assert machine.source.startswith("measured 20") and machine.device and "cores" in machine.about
    assert {dtype for dtype, _ in machine.gemms} == set(DTYPES)


def test_figures_are_those_of_some_machine(measured: Path) -> None:
    machine = Machine.named(str(measured))
    link, costs = machine.link, machine.costs
    sizes = [size for size, _ in link.gbps]
    assert sizes[0] <= 1 << 14 and sizes[-1] >= 1 << 24
    assert 0.1 < link.peak_gbps < 2000 and 0.1 < machine.memory_gbps < 2000
    for curve in (link.out_gbps, link.in_gbps, link.row_gbps):
        assert curve and all(0.01 < rate < 10_000 for _, rate in curve.points)
    small, large = (
        machine.gemm_us(32, 32, 64, "float32"),
        machine.gemm_us(2048, 512, 256, "float32"),
    )
    assert 0.1 < small < large / 20
    assert 0 < costs.signal_us < 1000 and 0 < costs.wait_us < 1000 and 0 < costs.clear_us < 1000
    assert costs != Costs()


def test_it_is_run_on_at_full_speed(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["run", "--machine", str(measured), "--ranks", "2", "--m", "64", "--n", "32",
                 "--k", "48", "--iters", "1", "--json"])  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    assert code == 0 and (found["machine"], found["paced"]) == ("desk", False)
    assert all(row["ok"] for row in found["results"])


def test_progress_goes_to_stderr_and_the_file_to_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ficco.measure.profiling.host import profile as whole

    monkeypatch.setattr(whole.parts, "gemm_points", lambda rig, dtype: [(8, 8, 8, 1.0)])
    target = tmp_path / "one.toml"
    assert main(["doctor", "--profile", str(target), "--ranks", "1"]) == 0
    out, err = capsys.readouterr()
    assert str(target) in out and "machine 'one'" in out and out.count("\n") == 1
    parts = ["memory", "copies", "signals", "GEMMs beside copies", "GEMMs", "calls"]
    assert [line.split(": ")[1] for line in err.splitlines()] == parts
    machine = Machine.named(str(target))
    assert machine.devices == 1 and machine.rated and not machine.link.out_gbps


def test_ranks_may_be_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank of those that the command starts, in this process; it measures with PyTorch."""
    from ficco.measure.profiling.host import rig

    started: list[int] = []
    monkeypatch.setattr(profile, "launch", lambda world: started.append(world) or 0)
    target = tmp_path / "ranks.toml"
    assert main(["doctor", "--profile", str(target), "--processes", "--ranks", "3"]) == 0
    assert started == [3] and not target.exists()
    monkeypatch.setattr(rig, "THOROUGH", rig.quick(1))
    given = {"RANK": "0", "WORLD_SIZE": "1", "FICCO_STORE": str(tmp_path / "store")}
    for name, value in {**given, "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--profile", str(target), "--processes"]) == 0
    assert str(target) in capsys.readouterr().out
    machine = Machine.named(str(target))
    assert machine.rated and machine.devices == 1 and machine.cores
    assert "processes" in machine.about and "torch" in machine.source


def test_figures_are_the_least_of_turns_and_of_the_slowest_rank() -> None:
    """Where others had the core, the time that it worked for this rank counts."""
    from ficco.measure.profiling.host.rig import own_us, quick, slowest

    worked = iter(range(1000))

    def made() -> Any:
        return lambda: time.sleep(0.001)

    idle = own_us([made, made], quick(2), lambda: 0.0)
    assert idle == [0.0, 0.0]
    busy = own_us([made], quick(2), lambda: float(next(worked)))
    assert busy[0] >= 1000  # a second of work in each turn is more than has passed
    spent = own_us([made, made], quick(2)._replace(budget_s=0.0), lambda: 0.0)
    assert len(spent) == 1, "the first is always measured"
    assert slowest([[1.0, 5.0, 9.0], [2.0, 4.0]]) == [2.0, 5.0]


def slow(paced: bool, tmp_path: Path) -> Machine:
    """Return a machine whose file says that a megabyte lasts 0.1 s, and a GEMM for ever."""
    file = tmp_path / "slow.toml"
    file.write_text(
        f'name = "slow"\nengine = "host"\ndevices = 2\npaced = {str(paced).lower()}\n'
        '[gemm_gflops]\nany = 0.001\n[[links]]\nscope = "node"\nper = "pair"\ngbps = [[1, 0.01]]\n'
    )
    return Machine.named(str(file))


@pytest.mark.parametrize("paced", [True, False])
def test_only_a_profile_that_paces_is_slow(paced: bool, tmp_path: Path) -> None:
    machine = slow(paced, tmp_path)
    assert machine.rated and machine.paced == paced and (machine.paced_link is not None) == paced
    assert machine.gemm_us(100, 100, 100, "float32") == pytest.approx(2e6)
    assert machine.paced_gemm_us(1e6, "float32") == (1e6 if paced else 0.0)
    xs, ws = [np.ones((100, 1000), np.float32)] * 2, [np.ones((1000, 1), np.float32)] * 2
    with ficco.Node(2, machine=machine) as node:
        begin = time.perf_counter()
        ys = node.all_gather_matmul(xs, ws, schedule="serial")
        took = time.perf_counter() - begin
        assert node.timeline().paced == paced
    assert all((y == 1000).all() for y in ys)
    assert took > 0.4 if paced else took < 0.4


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--profile", "there.toml"], "the file exists"),
        (["--profile", "machine.json"], "ends in .toml"),
        (["--profile", "none/machine.toml"], "No such file or directory"),
        (["--profile", "machine.toml", "--ranks", "0"], "--ranks 0"),
        (["--profile", "machine.toml", "--ranks", "65"], "--ranks 65"),
        (["--ranks", "3"], "needs --profile"),
        (["--processes"], "needs --profile"),
        (["--processes", "--profile", "machine.toml", "--ranks", "65"], "--ranks 65"),
        (["--json", "--profile", "machine.toml"], "--json with --profile machine.toml"),
    ],
)
def test_what_cannot_be_is_told_at_once(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.toml").write_text("mine")
    try:
        code = main(["doctor", *args])
    except SystemExit as stop:  # argparse
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    assert code == 2 and message in err and out == "" and "ficco doctor: memory" not in err
    assert os.listdir(tmp_path) == ["there.toml"]
    assert (tmp_path / "there.toml").read_text() == "mine"


class TestOnGpus:
    """Who measures: the GPUs' ranks are started where several serve; here they are not."""

    @pytest.fixture(autouse=True)
    def launched(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Worlds that were started."""
        started: list[int] = []

        def launch(world: int) -> int:
            started.append(world)
            return 0

        monkeypatch.setattr(profile, "launch", launch)
        monkeypatch.setattr(profile, "_on_host", lambda target, world: -world)
        monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
        monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
        return started

    def write(self, tmp_path: Path, ranks: int | None) -> int:
        return profile.write_profile(str(tmp_path / "machine.toml"), ranks)

    @pytest.mark.parametrize(
        ("devices", "ranks", "world"), [(2, None, 2), (4, None, 4), (16, None, 8), (4, 3, 3)]
    )
    def test_as_many_ranks_as_gpus(
        self, devices: int, ranks: int | None, world: int, gpus: Any, tmp_path: Path,
        launched: list[int],
    ) -> None:  # fmt: skip
        gpus(devices)
        assert self.write(tmp_path, ranks) == 0 and launched == [world]
        assert os.environ["NCCL_NVLS_ENABLE"] == "0"
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "0"  # as the user set it

    @pytest.mark.parametrize("ranks", [1, 5])
    def test_so_many_gpus_are_not_there(
        self, ranks: int, gpus: Any, tmp_path: Path, launched: list[int]
    ) -> None:
        gpus(4)
        with pytest.raises(ficco.InputError, match=f"--ranks {ranks}: .* 2 to 4"):
            self.write(tmp_path, ranks)
        assert launched == []

    def test_gpus_that_do_not_serve_are_told_of(
        self, gpus: Any, tmp_path: Path, launched: list[int], capsys: pytest.CaptureFixture[str]
    ) -> None:
        gpus(4, "PyTorch is a build without CUDA")
        assert self.write(tmp_path, None) == -4 and launched == []
        assert "measures the host engine: PyTorch is a build" in capsys.readouterr().err
        gpus(1)
        assert self.write(tmp_path, 3) == -3
        assert "needs two of them" in capsys.readouterr().err

    def test_under_torchrun_nothing_is_measured(
        self, gpus: Any, tmp_path: Path, launched: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gpus(2)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        with pytest.raises(ficco.InputError, match="without torchrun"):
            self.write(tmp_path, None)
        assert launched == []

    def test_missing_bindings_are_told_before_ranks_start(
        self, gpus: Any, tmp_path: Path, launched: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gpus(2)
        monkeypatch.setattr(profile, "find_spec", lambda name: None)
        with pytest.raises(ficco.EngineError, match=r"pip install 'ficco\[cuda\]'"):
            self.write(tmp_path, None)
        assert launched == []
