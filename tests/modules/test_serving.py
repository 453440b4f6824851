"""Plugins of serving frameworks, on two ranks; what these check is in the workers beside this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks_of_torch import run


@pytest.mark.parametrize("what", ["double", "flags"])
def test_the_plugin_of_vllm(what: str, tmp_path: Path, torch: Any) -> None:
    run("vllm_worker.py", 2, tmp_path, checks=(what,))


@pytest.mark.parametrize("what", ["double", "flags"])
def test_the_plugin_of_sglang(what: str, tmp_path: Path, torch: Any) -> None:
    run("sglang_worker.py", 2, tmp_path, checks=(what,))


def test_the_plugin_on_vllm_itself_of_other_libraries(
    tmp_path: Path, torch: Any, request: pytest.FixtureRequest
) -> None:
    """Skipped where vLLM is missing; `--require vllm` fails instead."""
    if "vllm" not in request.config.getoption("--require"):
        pytest.importorskip("vllm")
    run("vllm_worker.py", 2, tmp_path, checks=("real",))
