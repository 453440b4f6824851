"""What predict.json says of predictions, and scenarios.json of the paper's shapes."""

from __future__ import annotations

from tables.sources import Document, table


def prediction_table(document: Document) -> list[str]:
    """Return errors and choices, by kind of call and by who predicts."""
    parts = {f"captured, {world} GPUs": part for world, part in document["by_world"].items()}
    parts |= {
        {"eager": "back to back", "synchronized": "synchronized each"}[regime]: part
        for regime, part in document["by_regime"].items()
        if regime != "captured"
    }
    rows = []
    for title, part in parts.items():
        for method in ("simulator", "rule"):
            found = part[method]
            rows.append([
                title, method, str(found["errors"]["count"]), f"{found['errors']['median']:.1%}",
                f"{found['errors']['p90']:.1%}",
                f"{found['choices_right']} ({found['choices_within_3_percent']}) of "
                f"{part['cases']}",
                str(found["slower_than_serial"]),
            ])  # fmt: skip
    head = ["calls", "by", "schedules", "median error", "90th percentile", "right choices",
            "slower than `serial` by 3%"]  # fmt: skip
    return table(head, rows)


def scenario_table(document: Document) -> list[str]:
    """Return the paper's scenarios by how they are read and how fast links are."""
    rows = [
        [part["reading"].removeprefix("n is "), f"x {part['links']:g}",
         f"{part['ideal_most']:.2f}x", f"{part['ficco_most']:.2f}x",
         f"{part['ficco_geomean']:.2f}x", f"{part['shard_level_geomean']:.2f}x",
         f"{part['gated_geomean']:.2f}x",
         f"{part['ahead_of_shard_level']} of {part['scenarios']}"]
        for part in document["summary"]
    ]  # fmt: skip
    head = ["n", "links", "ideal, at most", "FiCCO, at most", "FiCCO, geometric mean",
            "shard level", "gated", "FiCCO ahead of shard level"]  # fmt: skip
    right = document["rule_within_3_percent_of_the_simulator"]
    return [
        *table(head, rows),
        "",
        f"The rule's choice is within 3% of the simulator's in {right}.",
    ]
