"""What calls cost the host: host_cost_*.json, signals_*.json and cold_start_*.json."""

from __future__ import annotations

from typing import Any

from tables.sources import Document, table

PARTS = {
    "public": "whole call", "native": "native code", "torch": "engine, in Python and torch",
    "around": "before the engine", "serial": "NCCL and `torch.mm`", "torch_fused": "fused",
}  # fmt: skip
FURTHER = {
    "public": "whole call", "after_a_wait": "first after a wait",
    "custom_op": "as a custom operator", "recorded": "with autograd", "backward": "backward pass",
    "serial_by_ficco": "`serial` as a call of ficco",
    "serial_after_a_wait": "NCCL and `torch.mm`, first after a wait",
}  # fmt: skip
MEDIANS = {"host_us": "host", "eager_us": "GPU, eager", "captured_us": "GPU, captured"}
KINDS = {"write": "stream write", "copy": "copy of 4 bytes", "store": "store by a kernel"}
Case = dict[str, Any]


def parts_table(document: Document) -> list[str]:
    """Return the host's time of a call, and its parts."""
    return _costs(document, _known(document, PARTS))


def further_table(document: Document) -> list[str]:
    """Return the host's times of other kinds of calls; empty for older results, which lack them."""
    parts = _known(document, FURTHER)
    return _costs(document, parts) if "custom_op" in parts else []


def _known(document: Document, parts: dict[str, str]) -> dict[str, str]:
    known = {part for case in document["cases"] for part in case["us"]}
    return {part: title for part, title in parts.items() if part in known}


def _costs(document: Document, parts: dict[str, str]) -> list[str]:
    rows = []
    for case in document["cases"]:
        cells = [_cell(case, part) for part in parts]
        shape = f"`{case['op']}` {case['m']} x {case['n']} x {case['k']}, `{case['schedule']}`"
        rows.append([shape, *cells])
    return table(["operator, m x n x k, schedule", *parts.values()], rows)


def _cell(case: Case, part: str) -> str:
    if part == "torch_fused" and case["op"] == "matmul_all_reduce":
        return "-"  # older results have the time of the scattering operator
    found = case["us"].get(part, {})
    return f"{found['median']:.0f}" if "median" in found else "not measured"


def signals_table(document: Document) -> list[str]:
    """Return microseconds by kind of signal, for each number of peers and size of copies."""
    rows = []
    for row in document["rows"]:
        place = (
            f"behind copies of {row['bytes'] // 1024} KiB" if row["bytes"] else "behind a kernel"
        )
        rows += [
            [f"{place}, {row['peers']} peer{'s' if row['peers'] > 1 else ''}", title,
             *[f"{row[kind][figure]['median']:.1f}" for figure in MEDIANS]]
            for kind, title in KINDS.items() if kind in row
        ]  # fmt: skip
    return table(["signals", "kind", *MEDIANS.values()], rows)


def start_table(document: Document) -> list[str]:
    """Return the seconds of the steps of a cold start."""
    times = document["times"]
    first = [row["first_s"] for row in document["lengths"]]
    second = [row["second_s"] for row in document["lengths"]]
    lengths = len(document["lengths"])
    rows = {
        "import PyTorch and open its NCCL group": f"{times['torch_and_nccl_s']:.1f} s",
        "open ficco's group": f"{times['open_s']:.2f} s",
        f"`reserve` for {document['rows']} rows": f"{times['size_windows_s']:.2f} s",
        "`reserve` again": f"{times['size_windows_again_s']:.2f} s",
        f"first pass of a new number of rows, {lengths} numbers":
            f"{1e3 * min(first):.0f} to {1e3 * max(first):.0f} ms",
        "second pass of the same number of rows":
            f"{1e3 * min(second):.0f} to {1e3 * max(second):.0f} ms",
        "kernels that Triton compiled": str(document["compiled"]),
    }  # fmt: skip
    return table(["step", "measured"], [list(row) for row in rows.items()])
