"""The accuracy of predictions, from predict.json and host_predictions.json."""

from __future__ import annotations

from tables.sources import Document, table

METHODS = ("simulator", "rule")


def prediction_table(document: Document) -> list[str]:
    """Return errors and choices, by kind of call and by method of prediction."""
    parts = {f"captured, `{name}`": part for name, part in document["by_machine"].items()}
    parts |= {
        f"{regime}, both": part
        for regime, part in document["by_regime"].items()
        if regime != "captured"
    }
    rows = []
    for title, part in parts.items():
        for method in METHODS:
            found = part[method]
            rows.append([
                title, method, str(found["errors"]["count"]), f"{found['errors']['median']:.1%}",
                f"{found['errors']['p90']:.1%}", str(part["cases"]),
                str(found["choices_right"]), str(found["choices_within_3_percent"]),
                str(found["slower_than_serial"]),
            ])  # fmt: skip
    head = ["calls", "predicted by", "points", "median error", "90th percentile", "shapes",
            "right choices", "within 3%", "slower than `serial`"]  # fmt: skip
    return table(head, rows)


def host_prediction_table(document: Document) -> list[str]:
    """Return errors on a CPU by number of ranks and method, and the loss of always `serial`."""
    rows = []
    for world in document["worlds"]:
        for method in METHODS:
            found = world["errors"][method]
            rows.append([
                str(world["world"]), method, str(len(world["cases"])), f"{found['median']:.1%}",
                f"{found['within_25_percent']:.0%}", f"{found['largest']:.0%}",
                f"{serial_loss(world):.0%}",
            ])  # fmt: skip
    head = ["ranks", "predicted by", "calls", "median error", "within 25%", "largest error",
            "`serial` over the fastest"]  # fmt: skip
    return table(head, rows)


def serial_loss(world: Document) -> float:
    """Return by how much `serial` is slower than the fastest schedule at most."""
    times: dict[tuple[str, int, int, int], dict[str, float]] = {}
    for case in world["cases"]:
        shape = case["op"], case["m"], case["n"], case["k"]
        times.setdefault(shape, {})[case["schedule"].split()[0]] = case["ms"]
    return max(found["serial"] / min(found.values()) for found in times.values()) - 1


def sending_table(document: Document) -> list[str]:
    """Return the predicted gains of kernels that send, by machine, operator and rows."""
    rows, heights = [], list[int]()
    for machine, cases in document["cases"].items():
        heights = sorted({case["m"] for case in cases})
        for op in dict.fromkeys(case["op"] for case in cases):
            gains = {case["m"]: case["gain"] for case in cases if case["op"] == op}
            rows.append([f"`{machine}`", f"`{op}`", *[f"{gains[m]:.2f}x" for m in heights]])
    return table(["profile", "operator", *map(str, heights)], rows)
