"""The paper's shapes on a full mesh, simulated, from scenarios.json."""

from __future__ import annotations

from typing import Any

from tables.sources import Document, table

AS_IS = "as assumed"


def plain(document: Document) -> list[dict[str, Any]]:
    """Return the summaries without changed assumptions, one per reading of n."""
    return [part for part in document["summary"] if part["variant"] == AS_IS]


def by_schedule(document: Document) -> list[str]:
    """Return a table with a row per schedule and a column per reading of n."""
    parts = plain(document)
    rows = []
    for name in parts[0]["schedules"]:
        found = [part["schedules"][name] for part in parts]
        cells = [f"{f['geomean']:.2f}x ({f['least']:.2f}x to {f['most']:.2f}x)" for f in found]
        rows.append([f"`{name}`", *cells])
    return table(["schedule", *(part["reading"] for part in parts)], rows)


def by_scenario(document: Document, reading: str) -> list[str]:
    """Return a table of the scenarios: shard level against the paper's schedules, and the rule."""
    rows = []
    for row in document["rows"]:
        if "rule" not in row or row["reading"] != reading:
            continue
        best, speedup, rule = row["best_ficco"], row["speedup"], row["rule"]
        rows.append([
            f"{row['id']}, {row['m']} x {row['n']} x {row['k']}", f"{row['ms']['serial']:.2f}",
            f"{row['ideal']:.2f}x", f"{speedup['shard_p2p']:.2f}x", f"{speedup[best]:.2f}x",
            f"`{best}`", f"{row['best_over_shard_level']:.2f}x", f"{speedup['gated_1d']:.2f}x",
            f"`{rule['takes']}`", f"{rule['lost']:.1%}",
        ])  # fmt: skip
    head = ["scenario, m x n x k", "`serial`, ms", "ideal", "`shard_p2p`", "best of the paper",
            "its schedule", "over `shard_p2p`", "`gated_1d`", "the rule takes",
            "and loses"]  # fmt: skip
    return table(head, rows)


def sensitivity(document: Document) -> list[str]:
    """Return a table of the effects of single assumptions."""
    rows = [
        [part["reading"], part["variant"], f"{part['ideal_most']:.2f}x",
         f"{part['ficco_most']:.2f}x", f"{part['ficco_geomean']:.2f}x",
         f"{part['schedules']['shard_p2p']['geomean']:.2f}x",
         f"{part['schedules']['gated_1d']['geomean']:.2f}x",
         f"{part['ahead_of_shard_level']} of {part['scenarios']}"]
        for part in document["summary"]
    ]  # fmt: skip
    head = ["reading", "changed", "ideal, largest", "best of the paper, largest",
            "best of the paper, mean", "`shard_p2p`, mean", "`gated_1d`, mean",
            "best of the paper ahead of `shard_p2p`"]  # fmt: skip
    return table(head, rows)


def rule_table(document: Document) -> list[str]:
    """Return how well the rule chooses, per reading of n."""
    rows = [
        [part["reading"], f"{part['right']} of {part['scenarios']}",
         f"{part['lost_most']:.1%}", f"{part['geomean']:.3f}x", f"{part['fastest_geomean']:.3f}x"]
        for part in document["rule"]
    ]  # fmt: skip
    head = ["reading", "within 3% of the fastest", "largest loss", "its choices over `serial`",
            "the fastest over `serial`"]  # fmt: skip
    return table(head, rows)
