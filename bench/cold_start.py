"""Measure the start-up times on a machine that never ran ficco: window sizing and new lengths.

Ranks are processes with an empty Triton cache. Unless --triton is given, importing Triton fails.
Rank 0's wall clock times: opening the group, `reserve` of one 70B block for 8192 rows, the
same again, and the first forward pass of new lengths, each compared with its second pass. Results
are compared with plain PyTorch. Compilations are counted.

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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROWS, SIZE = 8192, "70B"
LENGTHS = (1, 2, 7, 16, 40, 64, 100, 200, 300, 520, 777, 1003, 2048, 3001, 4099, 8000)
LIMIT_S = 240
MOST_OFF = 0.02  # largest error over the largest element, in bfloat16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, required=True, metavar="N")
    parser.add_argument("--triton", action="store_true", help="let the ranks use Triton")
    parser.add_argument(
        "--out", default=".", metavar="FOLDER", help="folder for cold_start_MACHINE.json"
    )
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
    """Keeps ficco's log lines."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(record.getMessage())


class Rank:
    """One rank: its group, and a Llama block in plain PyTorch and with ficco."""

    def __init__(self, with_triton: bool) -> None:
        begin = time.perf_counter()
        if not with_triton:
            sys.modules["triton"] = None  # type: ignore[assignment]
        import torch
        import torch.distributed as dist
        from modelling import llama
        from torch.distributed.device_mesh import init_device_mesh

        import ficco

        self.torch, self.dist, self.llama, self.ficco = torch, dist, llama, ficco
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cuda", self.rank)
        torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl", init_method=f"file://{os.environ['COLD_START_STORE']}", rank=self.rank,
            world_size=self.world, device_id=self.device,
        )  # fmt: skip
        self.mesh = init_device_mesh("cuda", (self.world,))
        dist.all_reduce(torch.ones(1, device=self.device))
        torch.cuda.synchronize()
        self.times = {"torch_and_nccl_s": round(time.perf_counter() - begin, 4)}
        self.size = replace(llama.SIZES[SIZE], layers=1)
        self.plain, self.model = (
            llama.made(self.size, self.mesh, False, torch.bfloat16) for _ in range(2)
        )
        llama.share_weights(self.model, self.plain)

    def timed(self, action: Callable[[], Any]) -> float:
        """Return the seconds of an action that all ranks start together."""
        self.dist.barrier()
        self.torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        self.torch.cuda.synchronize()
        return round(time.perf_counter() - start, 4)

    def prepare(self) -> None:
        """Open the group, overlap the model, and size its windows twice."""
        ficco, model = self.ficco, self.model
        opened = self.timed(lambda: ficco.prepare(self.mesh, machine="cuda", timeout_s=30.0))
        ficco.overlap(model, self.mesh, strict=True)
        sized = [self.timed(lambda: ficco.reserve(model, ROWS, backward=False)) for _ in range(2)]
        names = ("open_s", "size_windows_s", "size_windows_again_s")
        self.times |= dict(zip(names, (opened, *sized), strict=True))

    def serve(self, length: int) -> dict[str, float]:
        """Return the times of the first and the second pass of a length, and the error."""
        self.torch.manual_seed(length)
        dtype = self.torch.bfloat16
        x = self.torch.randn(length, self.size.width, dtype=dtype, device=self.device)
        angles = self.llama.angles_of(self.size, length, 0, "cuda", dtype)
        found: list[Any] = []
        with self.torch.no_grad():
            passes = [self.timed(lambda: found.append(self.model(x, angles))) for _ in range(2)]
            want = self.plain(x, angles).float()
        off = float((found[0].float() - want).abs().max() / want.abs().max())
        return {"rows": length, "first_s": passes[0], "second_s": passes[1], "off": off}


def rank_main(with_triton: bool, folder: Path) -> int:
    heard, log = Heard(), logging.getLogger("ficco")
    log.addHandler(heard)
    log.setLevel(logging.INFO)
    here = Rank(with_triton)
    here.prepare()
    rows = [here.serve(length) for length in LENGTHS]
    here.ficco.synchronize(here.mesh)
    wrong = [row["rows"] for row in rows if not row["off"] < MOST_OFF]
    if here.rank == 0:
        write(here, with_triton, folder, rows, wrong, heard.lines)
    here.ficco.close(here.mesh)
    here.dist.destroy_process_group()
    return 1 if wrong else 0


def write(
    here: Rank, with_triton: bool, folder: Path, rows: list[dict[str, float]], wrong: list[float],
    said: list[str],
) -> None:  # fmt: skip
    from record import gpus, surroundings

    compiled = sum(1 for _ in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))
    machine = f"{here.torch.cuda.get_device_name().split()[1].lower()}x{here.world}"
    document = {
        "bench": "cold_start", "model": SIZE, "rows": ROWS, **surroundings(), **gpus(),
        "triton": with_triton, "times": here.times, "lengths": rows, "compiled": compiled,
        "wrong": wrong, "fallback": here.ficco.fallback_reason(here.mesh), "said": said[:40],
        "layers": str(here.ficco.explain(here.model)).splitlines(),
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    name = f"cold_start_{machine}{'_triton' if with_triton else ''}.json"
    (folder / name).write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({"times": here.times, "compiled": compiled, "wrong": wrong}))
    for row in rows:
        print(row)


if __name__ == "__main__":
    raise SystemExit(main())
