"""What a machine that never ran ficco waits for: sizing windows of a Llama block, then new lengths.

Ranks are processes, with an empty Triton cache and, unless --triton is given, without Triton: an
import of it fails. Rank 0's wall clock tells: opening the group, `size_windows` of one 70B block
for 8192 rows, the same again, and the first forward pass of lengths that never came before, each
against its second pass. Results are held against plain PyTorch. Whatever was compiled is counted.

    python bench/cold_start.py --gpus 2 --out bench/results
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROWS, SIZE = 8192, "70B"
LENGTHS = (1, 2, 7, 16, 40, 64, 100, 200, 300, 520, 777, 1003, 2048, 3001, 4099, 8000)
LIMIT_S = 240


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, required=True, metavar="N")
    parser.add_argument("--triton", action="store_true", help="leave Triton to the ranks")
    parser.add_argument("--out", default=".", metavar="FOLDER", help="of cold_start_MACHINE.json")
    args = parser.parse_args()
    if "RANK" in os.environ:
        return rank_main(args.triton, Path(args.out))
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(args.gpus):
            given = os.environ | {
                "RANK": str(rank), "WORLD_SIZE": str(args.gpus), "TRITON_CACHE_DIR": f"{folder}/c",
                "COLD_START_STORE": f"{folder}/store", "NCCL_NVLS_ENABLE": "0",
                "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
            }  # fmt: skip
            ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=given))
        deadline = time.monotonic() + LIMIT_S
        try:
            codes = [rank.wait(max(1.0, deadline - time.monotonic())) for rank in ranks]
        except subprocess.TimeoutExpired:
            print(f"not done after {LIMIT_S} s", file=sys.stderr)
            codes = [1]
        finally:
            for rank in ranks:
                rank.kill()
    return max(codes, key=abs)


class Heard(logging.Handler):
    """Keeps what ficco logs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(record.getMessage())


def rank_main(with_triton: bool, folder: Path) -> int:
    begin = time.perf_counter()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not with_triton:
        sys.modules["triton"] = None  # type: ignore[assignment]
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import ficco
    from modelling.llama import SIZES, angles_of, made, share_weights
    from record import gpus, surroundings

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = f"file://{os.environ['COLD_START_STORE']}"
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=world,
                            device_id=device)  # fmt: skip
    mesh = init_device_mesh("cuda", (world,))
    dist.all_reduce(torch.ones(1, device=device))
    torch.cuda.synchronize()
    heard, times = Heard(), dict[str, Any](torch_and_nccl_s=time.perf_counter() - begin)
    log = logging.getLogger("ficco")
    log.addHandler(heard)
    log.setLevel(logging.INFO)

    def timed(action: Any) -> float:
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        torch.cuda.synchronize()
        return round(time.perf_counter() - start, 4)

    size = SIZES[SIZE].__class__(**{**vars(SIZES[SIZE]), "layers": 1})
    plain = made(size, mesh, False, torch.bfloat16)
    model = made(size, mesh, False, torch.bfloat16)
    share_weights(model, plain)
    times["open_s"] = timed(lambda: ficco.prepare(mesh, machine="cuda", timeout_s=30.0))
    ficco.overlap(model, mesh, strict=True)
    times["size_windows_s"] = timed(lambda: ficco.size_windows(model, ROWS, backward=False))
    times["size_windows_again_s"] = timed(lambda: ficco.size_windows(model, ROWS, backward=False))
    rows, wrong = [], []
    with torch.no_grad():
        for length in LENGTHS:
            torch.manual_seed(length)
            x = torch.randn(length, size.width, dtype=torch.bfloat16, device=device)
            angles = angles_of(size, length, 0, "cuda", torch.bfloat16)
            found: list[Any] = []
            first = timed(lambda x=x, angles=angles: found.append(model(x, angles)))
            second = timed(lambda x=x, angles=angles: model(x, angles))
            want = plain(x, angles).float()
            off = float((found[0].float() - want).abs().max() / want.abs().max())
            rows.append({"rows": length, "first_s": first, "second_s": second, "off": off})
            if not off < 0.02:
                wrong.append(length)
    ficco.synchronize(mesh)
    compiled = sum(1 for _ in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))
    result = {
        "times": times, "lengths": rows, "compiled": compiled, "triton": with_triton,
        "wrong": wrong, "fallback": ficco.fallback_reason(mesh),
    }  # fmt: skip
    if rank == 0:
        result["layers"] = str(ficco.explain(model)).splitlines()
        result["said"] = heard.lines[:40]
        machine = f"{torch.cuda.get_device_name().split()[1].lower()}x{world}"
        document = {"bench": "cold_start", "model": SIZE, "rows": ROWS, **surroundings(), **gpus()}
        name = f"cold_start_{machine}{'_triton' if with_triton else ''}.json"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(document | result, indent=1) + "\n")
        print(json.dumps({"times": times, "compiled": compiled, "wrong": wrong}))
        for row in rows:
            print(row)
    ficco.close(mesh)
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
