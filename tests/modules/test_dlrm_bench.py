"""bench/dlrm.py on a CPU: every way gives the results of PyTorch's calls."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from forking import run_ranks

BENCH = Path(__file__).parents[2] / "bench" / "dlrm.py"


def test_every_way_is_right(tmp_path: Path, torch: Any) -> None:
    out = tmp_path / "dlrm.json"
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "FICCO_MEASURE": "0"}
    run_ranks(
        2, BENCH, "--smoke", "--rounds", 2, "--out", out,
        folder=tmp_path, environment=environment, timeout=120,
    )  # fmt: skip
    found = json.loads(out.read_text())
    assert len(found["cases"]) == 2 and not found["left_out"]
    for case in found["cases"]:
        assert not case["refused"], case["refused"]
        assert set(case["errors"]) == set(found["ways"])
        for errors in case["errors"].values():
            assert max(errors.values()) < 1e-5, case["errors"]
        assert set(case["ms"]) == {"training, eager", "embeddings, eager", "inference, eager"}
        assert case["embedding_share"]["eager"] > 0
    _shown(found, tmp_path)


def _shown(document: dict[str, Any], folder: Path) -> None:
    """The page of models has the result's tables, and its reasons where a way failed."""
    document["cases"][0]["refused"] = {"training, torch_sparse, captured": {"0": "no memory"}}
    (folder / "dlrm_h100x2.json").write_text(json.dumps(document))
    code = (
        f"import sys; sys.path.insert(0, {str(BENCH.parent)!r})\n"
        "from pathlib import Path\n"
        "from pages.models import models\nfrom tables.sources import Page\n"
        "print(models(Page(Path(sys.argv[1]), '.')))"
    )
    page = subprocess.run(
        [sys.executable, "-P", "-c", code, folder], capture_output=True, text=True, check=True,
        timeout=60,
    ).stdout  # fmt: skip
    case = document["cases"][0]
    best = min(row["median"] for row in case["ms"]["training, eager"].values())
    assert f"**{best:.3f}**" in page, page
    assert f"| {case['torch_over_ficco']['inference, eager']:.2f}x |" in page, page
    assert "training, torch_sparse, captured: no memory" in page, page
    assert " 1 lookup, " in page and " 1 lookups" not in page, page
    assert "[dlrm_h100x2](./dlrm_h100x2.json)" in page, page
