"""Plugins of serving frameworks, on two ranks; what these check is in the workers beside this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks_of_torch import run


@pytest.mark.parametrize("what", ["double", "flags", "releases"])
def test_the_plugin_of_vllm(what: str, tmp_path: Path, torch: Any) -> None:
    run("vllm_worker.py", 2, tmp_path, checks=(what,))


@pytest.mark.parametrize("what", ["double", "flags"])
def test_the_plugin_of_sglang(what: str, tmp_path: Path, torch: Any) -> None:
    run("sglang_worker.py", 2, tmp_path, checks=(what,))


@pytest.mark.parametrize("library", ["vllm", "sglang"])
def test_the_plugin_on_other_libraries_themselves(
    library: str, tmp_path: Path, torch: Any, request: pytest.FixtureRequest
) -> None:
    """Skipped where the library is missing; `--require LIBRARY` fails instead."""
    if library not in request.config.getoption("--require"):
        pytest.importorskip(library)
    run(f"{library}_worker.py", 2, tmp_path, checks=("real",))
