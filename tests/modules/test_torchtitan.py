"""torchtitan that is missing, or lacks names; test_overlap.py runs its other checks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def run_code(code: str) -> str:
    """Run Python code beside the stand-ins; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False,
        cwd=Path(__file__).parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("prepared", "why"),
    [
        ("import sys; sys.modules['torchtitan'] = None", "torchtitan is not installed"),
        ("import torchtitan_double; torchtitan_double.install('override')", "0.3 or newer"),
    ],
)
def test_there_are_no_overrides(prepared: str, why: str, torch: Any) -> None:
    code = (
        f"{prepared}\n"
        "try: import ficco.integrations.torchtitan\n"
        "except ImportError as error: print(error)"
    )
    assert why in run_code(code)


@pytest.mark.parametrize(
    "name", ["FusedQKVLinear", "dense_sequence_parallel_placement", "RowParallelLinear"]
)
def test_a_name_is_absent(name: str, torch: Any) -> None:
    """A release of torchtitan without a name that an override needs is left as it is."""
    code = f"""
import torchtitan_double as double
double.install(without={name!r})
class Block(double.Module):
    @double.dataclass(kw_only=True, slots=True)
    class Config(double.Module.Config):
        feed_forward: object
linear = double.Linear.Config(in_features=2, out_features=2)
config = Block.Config(feed_forward=double.FeedForward.Config(w1=linear, w2=linear, w3=linear))
both = [f"ficco.integrations.torchtitan.{{each}}" for each in ("attention", "feed_forward")]
print(double.apply_overrides(double.OverrideConfig(both), config))
assert type(config.feed_forward) is double.FeedForward.Config
"""
    said = run_code(code)
    assert "[]" in said and f":{name}" in said and "left as it is" in said, said
