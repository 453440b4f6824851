"""bench/dlrm.py on a CPU: every way gives the results of PyTorch's calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forking import run_forked

BENCH = Path(__file__).parents[2] / "bench" / "dlrm.py"


def test_every_way_is_right(tmp_path: Path, torch: Any) -> None:
    import torch.distributed.run

    out = tmp_path / "dlrm.json"
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "FICCO_MEASURE": "0"}
    code, said = run_forked(
        Path(torch.distributed.run.__file__), "--standalone", "--nproc-per-node", 2,
        BENCH, "--smoke", "--rounds", 2, "--out", out,
        folder=tmp_path, environment=environment, timeout=120,
    )  # fmt: skip
    assert code == 0, said
    found = json.loads(out.read_text())
    assert len(found["cases"]) == 2 and not found["left_out"]
    for case in found["cases"]:
        assert not case["refused"], case["refused"]
        assert set(case["errors"]) == set(found["ways"])
        for errors in case["errors"].values():
            assert max(errors.values()) < 1e-5, case["errors"]
        assert set(case["ms"]) == {"training, eager", "embeddings, eager", "inference, eager"}
        assert case["embedding_share"]["eager"] > 0
