"""Costs of cutting a GEMM, and contention of a GEMM and a transfer, from characterize_*.json."""

from __future__ import annotations

from tables.sources import Document, table

CUTS = {"rows": "by rows", "columns": "along k"}


def cut_table(document: Document) -> list[str]:
    """Return the time of all parts of a GEMM over that of the whole, by number of parts."""
    counts = sorted({count for entry in document["dil"] for count, _ in entry["ratio"]})
    rows = []
    for entry in document["dil"]:
        found = dict(entry["ratio"])
        ratios = [f"{found[count]:.2f}" if count in found else "-" for count in counts]
        shape = f"{entry['m']} x {entry['n']} x {entry['k']}, {CUTS[entry['cut']]}"
        rows.append([shape, *ratios])
    return table(["GEMM, m x n x k, and cut", *[f"{count} parts" for count in counts]], rows)


def contention_table(document: Document) -> list[str]:
    """Return the times of a GEMM and of a transfer side by side, over their times alone."""
    rows = []
    for entry in document["cil"]:
        for found in entry["found"]:
            size = found["chunk_bytes"]
            beside = f"copies of {size / 2**20:g} MiB" if size else "an all-gather by NCCL"
            shape = " x ".join(map(str, entry["shape"]))
            rows.append([shape, beside, f"{found['gemm']:.2f}", f"{found['transfer']:.2f}"])
    head = ["GEMM, m x n x k", "beside", "time of the GEMM", "time of the transfer"]
    return table(head, rows)
