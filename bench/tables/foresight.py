"""The accuracy of predictions, from predict.json."""

from __future__ import annotations

from tables.sources import Document, table


def prediction_table(document: Document) -> list[str]:
    """Return errors and choices, by kind of call and by method of prediction."""
    parts = {f"captured, `{name}`": part for name, part in document["by_machine"].items()}
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
