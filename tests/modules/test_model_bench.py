"""bench/model.py on the CPU, with a tiny model: it measures, holds results to PyTorch's, tells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from forking import run_forked

BENCH = Path(__file__).parents[2] / "bench"


def test_a_tiny_model_is_measured(tmp_path: Path, torch: Any) -> None:
    """Every kind of step has figures of PyTorch and ficco, with equal results, and a table."""
    code, said = run_forked(
        Path(__file__).with_name("model_bench.py"), BENCH, "--gpus", 2, "--tiny",
        "--parts", "eager", "--rounds", 2, "--cell-seconds", 1, "--seconds", 100, "--out", tmp_path,
        folder=tmp_path, environment={"GLOO_SOCKET_IFNAME": "lo"}, timeout=200,
    )  # fmt: skip
    assert code == 0, said
    result = json.loads((tmp_path / "model_hostx2.json").read_text())
    assert [cell["mode"] for cell in result["cells"]] == [
        "training", "prefill", "prefill_tp", "decode", "serving",
    ]  # fmt: skip
    for cell in result["cells"]:
        assert not cell["refused"], cell
        assert set(cell["variants"]) == {"torch", "ficco"}
        for row in cell["variants"].values():
            assert row["ms_per_layer"]["runs"] == 2
            assert row["ms_per_layer"]["median"] > 0
            assert max(row["errors"].values()) < 1e-4
        assert "14 of 14" in cell["explained"]
    wanted = {"output", "loss", "input gradient", "first weight gradient", "last weight gradient"}
    assert set(result["cells"][0]["variants"]["ficco"]["errors"]) == wanted
    assert "| training, tiny, 32 tokens |" in said


def test_tables_tell_what_won_and_what_failed(tmp_path: Path) -> None:
    """Without results they are silent; of several the latest stands."""

    def row(ms: float) -> dict[str, Any]:
        return {
            "ms_per_layer": {"median": ms, "iqr": 0.0, "runs": 5},
            "memory_bytes": {"whole": 3 * 2**30},
        }

    cell = {"mode": "training", "model": "70B", "tokens": 8192, "refused": {"torch_graph": "no"}}
    first = cell | {"variants": {"torch": row(4.0), "ficco": row(9.0)}}
    later = cell | {"variants": {"torch": row(9.0), "torch_async": row(9.0)}, "refused": {}}
    again = cell | {"variants": {"ficco": row(3.2)}}
    more = cell | {"variants": {"ficco": row(9.0), "torch_async": row(3.0)}, "refused": {}}
    for name, day, found in (
        ("model_h200x4", 21, [first, later]), ("model_h200x4_again", 22, [again]),
        ("model_h200x4_more", 22, [more]),
    ):  # fmt: skip
        document = {
            "gpus": [{"name": "NVIDIA H200"}],
            "world": 4,
            "date": f"2026-11-{day}",
            "cells": found,
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    code = (
        "import sys; from pathlib import Path; from modelling.tables import *\n"
        "for folder in map(Path, sys.argv[1:]):\n"
        "    for paths, document in results_of(folder):\n"
        "        print(*model_table(document), losses(document, 'best over best'), sep='\\n')\n"
        "    print('end')"
    )
    command = [sys.executable, "-P", "-c", code, str(tmp_path), str(tmp_path / "none")]
    paths = [str(BENCH), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr
    full, silent = done.stdout.split("end\n")[:2]
    step = "| training, 70B, 8192 tokens |"
    assert f"{step} 4.000 | - | - | **3.000** | 3.200 | - | - |" in full
    assert f"{step} 1.25x | - | - | 0.94x | 3.0 | 3.0 |" in full
    assert "Variants without figures: PyTorch, graph (training, 70B, 8192 tokens)." in full
    assert "(1, 1)" in full
    assert not silent.strip()
