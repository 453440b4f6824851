"""Paced runs and the overheads on a CPU, from paced.json and host.json."""

from __future__ import annotations

from tables.sources import Document, table


def paced_table(document: Document) -> list[str]:
    """Return milliseconds and speed-ups by schedule and machine, the fastest in bold."""
    runs = {run["machine"]: run for run in document["runs"]}
    rows = []
    for index, row in enumerate(next(iter(runs.values()))["rows"]):
        cells = [f"`{row['schedule']}`"]
        for run in runs.values():
            best = max(other["speedup"] for other in run["rows"])
            found = run["rows"][index]
            text = f"{found['ms']['median']:.1f} ({found['speedup']:.2f}x)"
            cells.append(f"**{text}**" if found["speedup"] == best else text)
        rows.append(cells)
    return table(["schedule", *[f"`{name}`" for name in runs]], rows)


def problem_of(document: Document) -> str:
    """Return the paced problem, and its number of runs."""
    first = document["runs"][0]
    return (
        f"all-gather + matmul with m = {first['m']}, n = {first['n']}, k = {first['k']}, "
        f"{first['dtype']}, {first['ranks']} ranks; median of {first['rows'][0]['ms']['runs']} runs"
    )


def overhead_table(document: Document) -> list[str]:
    """Return the medians of the slowest schedule."""
    ratio = min(entry["ratio"] for entry in document["copies"])
    lowering = max(value["median"] for value in document["lower_rank_ms"].values())
    proof = max(value["median"] for value in document["verify_s"].values())
    rows = {
        "rate of a lane's copies of 1 MiB or more, over the rate of `memcpy`": f"{ratio:.0%}",
        "submit 64 steps to a lane": f"{document['submit_64_steps_us']['median']:.1f} us",
        "lower the plan of one rank of 8, grain 8": f"{lowering:.2f} ms",
        "verify the plans of all 8 ranks": f"{1e3 * proof:.0f} ms",
        "lower and bind a new number of rows, 4 ranks, grain 4": _new_rows(document, "4 ranks"),
        "lower and bind a new number of rows, 8 ranks, grain 8":
            _new_rows(document, "8 ranks, grain 8"),
        "`import ficco`": f"{1e3 * document['import_s']['median']:.0f} ms",
    }  # fmt: skip
    return table(["what", "measured"], [list(row) for row in rows.items()])


def _new_rows(document: Document, which: str) -> str:
    found = [v["median"] for name, v in document["never_seen_m_ms"].items() if which in name]
    return f"{min(found):.2f} to {max(found):.2f} ms, by operator"
