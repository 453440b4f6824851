"""ficco.device under Triton's interpreter, on 1 to 8 ranks, and compiled for GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from forking import run_forked

INTERPRETED = (
    "signals", "stores", "barriers", "mailboxes", "late", "failures", "astrays", "refusals",
    "products", "embeddings", "declared",
)  # fmt: skip
COMPILED = "order", "widths", "examples", "following", "refusals"


@pytest.mark.parametrize(
    ("worker", "subject"),
    [
        *(("interpreted", subject) for subject in INTERPRETED),
        *(("compiled", subject) for subject in COMPILED),
        ("group", ""),
        ("group", "apart"),
    ],
)
def test_it_is_right(worker: str, subject: str, tmp_path: Path, torch: object) -> None:
    settings = {
        "TRITON_INTERPRET": "0" if worker == "compiled" else "1", "TRITON_CACHE_DIR": "cache",
        "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    code, said = run_forked(
        Path(__file__).with_name(f"{worker}_worker.py"), *subject.split(),
        folder=tmp_path, environment=settings, timeout=200,
    )  # fmt: skip
    assert code == 0 and "right" in said, said
    if "not permitted" in said:
        pytest.skip(said.splitlines()[0])


def test_without_triton_it_says_what_is_missing(tmp_path: Path, torch: object) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nsys.modules['triton'] = None\nimport ficco\nficco.window\n")
    code, said = run_forked(script, folder=tmp_path, environment={}, timeout=60, kind="torch")
    assert code != 0 and "ficco.device needs Triton" in said and "pip install" in said, said
