"""Measure the losses of cut GEMMs (DIL) and of GEMMs and transfers side by side (CIL) on GPUs.

DIL: time of all pieces alone / time of the whole - 1, cut by rows and by k. CIL: time beside the
other / time alone - 1, of a GEMM beside copies of several sizes and beside NCCL, and vice versa.

    python bench/characterize.py --gpus 4 --out bench/results
    python bench/characterize.py --draw bench/results/characterize_h200x4.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import surroundings

from ficco.measure.launching import NO_MULTICAST, run_ranks

# m, n of a rank, k: from few waves of tiles to many, wide and narrow.
SHAPES = (
    (2048, 14336, 8192), (8192, 1280, 8192), (8192, 3584, 8192), (8192, 8192, 2048),
    (8192, 7168, 8192), (32768, 2048, 8192), (16384, 13312, 16384),
)  # fmt: skip
BESIDE = ((8192, 3584, 8192), (8192, 8192, 2048), (32768, 2048, 8192))
SECONDS = 200.0


def rank_main(folder: Path) -> int:
    """Measure on one rank; rank 0 writes the results."""
    for name, value in NO_MULTICAST.items():
        os.environ.setdefault(name, value)
    os.environ["FICCO_STORE"] = str(folder / "store-of-ranks")
    from ficco.measure.profiling.gpu.gemms import contention, piece_ratios
    from ficco.measure.profiling.gpu.ranks import Ranks, RecvBuffer

    ranks = Ranks()
    recv = RecvBuffer(ranks)
    losses = []
    for shape in BESIDE:
        ranks.beat()
        losses.append({"shape": shape, "found": contention(ranks, recv, shape)})
    cuts = []
    for shape in SHAPES:
        ranks.beat()
        cuts += piece_ratios(ranks, [shape])
    if ranks.rank == 0:
        (folder / "found.json").write_text(json.dumps({"dil": cuts, "cil": losses}))
    ranks.close()
    return 0


def label(entry: dict[str, Any]) -> str:
    return f"{entry['m']}x{entry['n']}x{entry['k']}"


def draw(document: dict[str, Any], path: Path) -> None:
    """Plot DIL by number of pieces, and CIL by size of copies."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "ficco"  # the same figures give the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), constrained_layout=True)
    for axis, cut in zip(axes, ("rows", "columns"), strict=False):
        for entry in document["dil"]:
            if entry["cut"] == cut:
                pieces, ratios = zip(*entry["ratio"], strict=True)
                axis.plot(pieces, [100 * (r - 1) for r in ratios], marker="o", label=label(entry))
        axis.set_xscale("log", base=2)
        axis.set_xlabel(f"pieces, cut by {'rows' if cut == 'rows' else 'k'}")
        axis.set_ylabel("DIL, %")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="x-small", title="m x n x k")
    width = 0.8 / len(document["cil"])
    for count, entry in enumerate(document["cil"]):
        names, gemm, transfer = [], [], []
        for found in entry["found"]:
            size = found["chunk_bytes"]
            names.append(f"{size / 2**20:g} MiB" if size else "NCCL")
            gemm.append(100 * (found["gemm"] - 1))
            transfer.append(100 * (found["transfer"] - 1))
        places = [number + (count - 1) * width for number in range(len(names))]
        name = "x".join(map(str, entry["shape"]))
        bars = axes[2].bar(places, gemm, width, label=f"GEMM {name}")
        color = bars.patches[0].get_facecolor()
        axes[2].plot(places, transfer, "v", color=color, markeredgecolor="black")
    axes[2].set_xticks(range(len(names)), names)
    axes[2].set_xlabel("beside copies of this size, or an all-gather")
    axes[2].set_ylabel("CIL, % (bars: the GEMM's; triangles: the transfer's)")
    axes[2].set_yscale("symlog", linthresh=10)
    axes[2].legend(fontsize="x-small")
    axes[2].grid(alpha=0.3)
    gpu = document["gpus"][0]["name"] if document["gpus"] else "GPU"
    figure.suptitle(f"{document['world']} x {gpu}, bfloat16, {document['date']}")
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, metavar="N")
    parser.add_argument(
        "--out", default=".", metavar="FOLDER", help="folder for characterize_MACHINE.json"
    )
    parser.add_argument("--draw", metavar="JSON", help="plot this result as an SVG file next to it")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        return rank_main(Path(args.rank_of))
    if args.draw:
        source = Path(args.draw)
        draw(json.loads(source.read_text()), source.with_suffix(".svg"))
        return 0
    if not args.gpus or args.gpus < 2:
        parser.error("--gpus N of 2 or more, or --draw JSON")
    with tempfile.TemporaryDirectory(prefix="characterize") as name:
        folder = Path(name)
        command = [__file__, "--gpus", str(args.gpus), "--rank-of", name]
        reason = run_ranks(command, args.gpus, folder, SECONDS, lambda: None)
        if not (folder / "found.json").exists():
            print(reason, file=sys.stderr)
            return 1
        found = json.loads((folder / "found.json").read_text())
    from naming import machine_name
    from record import gpus

    about, more = surroundings(), gpus()
    about["versions"] |= more.pop("more")
    document = {"bench": "characterize", **about, **more, "world": args.gpus,
                "environment": NO_MULTICAST, **found}  # fmt: skip
    path = Path(args.out, f"characterize_{machine_name(document)}.json")
    path.write_text(json.dumps(document, indent=1) + "\n")
    for entry in document["dil"]:
        print(f"DIL by {entry['cut']:7} {label(entry):20} {entry['ratio']}")
    for entry in document["cil"]:
        print(f"CIL {entry['shape']} {entry['found']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
