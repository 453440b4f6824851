"""The paper's shapes on a full mesh, simulated, from scenarios.json."""

from __future__ import annotations

from typing import Any

from tables.sources import Document, table


def scenario_section(document: Document, link: str) -> list[str]:
    """Return assumptions, speed-ups by schedule and scenario, sensitivity, and the rule's choices.

    Args:
        document: contents of scenarios.json.
        link: link to scenarios.json.
    """
    plain = [part for part in document["summary"] if part["variant"] == "as assumed"]
    return [
        f"**Nothing of this ran; every figure here is simulated.** `{document['machine']}`: "
        f"{document['source']}. All-gather + matmul, bfloat16, grain {document['grain']}, calls in "
        f"a graph ({link}; the same shapes with all grains: `ficco sweep paper_mi300x --out DIR`). "
        "Assumed is:", "",
        *(f"- {text}" for text in document["assumptions"]), "",
        "Times as fast as serial, geometric mean over the scenarios (least to most):", "",
        *by_schedule(plain), "",
        *by_scenario(document), "",
        "How much hangs on what is assumed: one assumption moved at a time; FiCCO is the best of "
        "the paper's four schedules (simulated):", "",
        *sensitivity(document["summary"]), "",
        *(rule_line(part) for part in document["rule"]),
    ]  # fmt: skip


def scenario_summary(document: Document, link: str) -> list[str]:
    """Return the assumptions, speed-ups by schedule, and their sensitivity to assumptions."""
    plain = [part for part in document["summary"] if part["variant"] == "as assumed"]
    moved = []
    for part in plain:
        found = [p for p in document["summary"] if p["reading"] == part["reading"]]
        means = [p["ficco_geomean"] for p in found]
        moved.append(f"{min(means):.2f}x to {max(means):.2f}x where {part['reading']}")
    return [
        f"**Nothing of this ran.** `{document['machine']}`: {document['source']}. All-gather + "
        f"matmul, grain {document['grain']} ({link}); assumed is: "
        f"{'; '.join(document['assumptions'])}. Times as fast as serial, geometric mean (least to "
        "most):", "",
        *by_schedule(plain), "",
        "One assumption moved at a time (rates by 20%, contention of 10%, costs as on H200) leaves "
        f"the best of the paper's four schedules {' and '.join(moved)}.", "",
        *(rule_line(part) for part in document["rule"]),
    ]  # fmt: skip


def by_schedule(plain: list[dict[str, Any]]) -> list[str]:
    """Return a table with a row per schedule and a column per reading of n."""
    rows = []
    for name in plain[0]["schedules"]:
        found = [part["schedules"][name] for part in plain]
        cells = [f"{f['geomean']:.2f} ({f['least']:.2f} to {f['most']:.2f})" for f in found]
        rows.append([f"`{name}`", *cells])
    return table(["schedule", *(part["reading"] for part in plain)], rows)


def by_scenario(document: Document) -> list[str]:
    """Return a folded table of the scenarios: shard level against FiCCO, and the rule's choice."""
    rows = []
    for row in [row for row in document["rows"] if "rule" in row]:
        best, speedup, rule = row["best_ficco"], row["speedup"], row["rule"]
        rows.append([
            f"{row['id']}, {row['m']} x {row['n']} x {row['k']}", f"{row['ms']['serial']:.2f}",
            f"{row['ideal']:.2f}", f"{speedup['shard_p2p']:.2f}", f"{speedup[best]:.2f} `{best}`",
            f"{row['best_over_shard_level']:.2f}", f"{speedup['gated_1d']:.2f}",
            f"`{rule['takes']}`", f"{rule['lost']:.1%}",
        ])  # fmt: skip
    head = ["scenario, m x n x k over all GPUs", "serial, ms", "ideal", "shard level",
            "FiCCO's best", "over shard level", "gated", "the rule takes", "it loses"]  # fmt: skip
    title = (
        "Each scenario: times as fast as serial, shard level against FiCCO, and the rule's choice "
        "(simulated)"
    )
    return [f"<details><summary>{title}</summary>", "", *table(head, rows), "", "</details>"]


def sensitivity(summary: list[dict[str, Any]]) -> list[str]:
    """Return a table of the effects of single assumptions."""
    rows = [
        [part["reading"].removeprefix("n is "), part["variant"], f"{part['ideal_most']:.2f}x",
         f"{part['ficco_most']:.2f}x", f"{part['ficco_geomean']:.2f}x",
         f"{part['schedules']['shard_p2p']['geomean']:.2f}x",
         f"{part['schedules']['gated_1d']['geomean']:.2f}x",
         f"{part['ahead_of_shard_level']} of {part['scenarios']}"]
        for part in summary
    ]  # fmt: skip
    head = ["n", "moved", "ideal, at most", "FiCCO, at most", "FiCCO, geometric mean",
            "shard level", "gated", "FiCCO ahead of shard level"]  # fmt: skip
    return table(head, rows)


def rule_line(part: dict[str, Any]) -> str:
    """Return the losses of the rule's choices."""
    return (
        f"Where {part['reading']}, the selector's rule is within 3% of the fastest candidate, as "
        f"simulated on the same profile, in {part['right']} of {part['scenarios']} scenarios; it "
        f"loses {part['lost_most']:.1%} at most and is {part['geomean']:.3f} times as fast as "
        f"serial, of {part['fastest_geomean']:.3f} that there are."
    )
