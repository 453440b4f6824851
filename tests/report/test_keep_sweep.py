"""What bench/keep_sweep.py keeps of a sweep's folder, by which name, and what it refuses."""

from __future__ import annotations

import json
import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import sweep_folders

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "keep_sweep.py"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: Any) -> Any:
    """Keep a sweep of one shape with this head; return the exit code and the files."""
    pytest.importorskip("matplotlib")

    def called(ended: bool = True, **head: Any) -> tuple[int, list[str]]:
        folder, out = tmp_path / "swept", tmp_path / "kept"
        out.mkdir()
        lines = sweep_folders.simulated_sweep(
            folder, sweep_folders.SHAPES[:1], grains=(1,), noise=0.01, regimes=("captured",)
        )
        lines[0]["ended"] = ended
        sweep_folders.write(folder, "h200x4", lines, executed=True)
        points = sum(line["kind"] in ("point", "bad") for line in lines)
        path = folder / "sweep.json"
        about = {**json.loads(path.read_text()), "world": 4, "points": points, **head}
        monkeypatch.syspath_prepend(SCRIPT.parent)
        path.write_text(json.dumps(about))
        spec = util.spec_from_file_location("keep_sweep", SCRIPT)
        assert spec is not None and spec.loader is not None
        module = util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(sys, "argv", ["keep_sweep.py", str(folder), "--out", str(out)])
        return module.main(), sorted(path.name for path in out.iterdir())

    return called


@pytest.mark.parametrize(
    ("grid", "gpus", "name"),
    [
        ("h200", ["NVIDIA H200"], "sweep_h200x4"),
        ("other", ["NVIDIA H100 80GB HBM3"], "sweep_other_h100x4"),
        ("other", [], "sweep_other_hostx4"),
    ],
)
def test_files_are_named_by_grid_and_machine(
    kept: Any, grid: str, gpus: list[str], name: str
) -> None:
    about = [{"name": gpu} for gpu in gpus]
    assert kept(grid=grid, gpus=about) == (
        0,
        [f"{name}.json", f"{name}_gains.svg", f"{name}_map.svg"],
    )


def test_an_unfinished_sweep_is_refused(kept: Any, capsys: Any) -> None:
    assert kept(ended=False, grid="h200") == (1, [])
    assert "unfinished sweep" in capsys.readouterr().err


def test_a_sweep_with_points_missing_is_refused(kept: Any) -> None:
    assert kept(grid="h200", points=10_000) == (1, [])
