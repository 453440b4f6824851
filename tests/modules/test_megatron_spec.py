"""The spec for Megatron-LM's --spec, on stand-ins; `frameworks_worker.py` has Megatron-Core's."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import megatron_double
import megatron_spec_check
import pytest


def test_a_spec_has_megatrons_linear_layers(torch: Any) -> None:
    core = "megatron.core."
    paths = [
        core + "extensions.transformer_engine",
        core + "extensions.transformer_engine_spec_provider",
        core + "models.gpt.gpt_layer_specs",
    ]
    with megatron_double.modules(*paths, HAVE_TE=False, **vars(megatron_double)):
        megatron_spec_check.megatron_spec(megatron_double.modules)


def test_megatron_core_is_asked_for(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.extensions.transformer_engine", None)
    megatron_spec_check.refused("Megatron-Core cannot be imported (import of megatron.core")
    megatron_spec_check.refused("; install megatron-core")


def test_ficco_imports_no_integration(torch: Any) -> None:
    code = "import sys, torch, ficco; ficco.overlap; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    names = found.stdout.split()
    assert "ficco.api.overlapping" in names
    assert not [n for n in names if n.startswith(("ficco.integrations", "megatron"))]
