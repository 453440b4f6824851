"""Results from times: medians, the best, ratios, and a text table. It does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from record import spread

from ficco.cli.sweeping import results
from ficco.cli.sweeping.results import fastest, medians

REGIMES = ("eager", "synchronized", "captured")
BASELINES = ("serial", "torch_fused")
ASKED = ("asked_route", "asked_order", "asked_pace", "asked_taper")
Times = Mapping[tuple[str, str], Sequence[float]]  # (configuration, regime): ms of the slowest rank


def best_points(screened: Times, count: int) -> dict[str, list[str]]:
    """Return, by regime, the configurations with the lowest medians."""
    found = medians(screened)
    return {
        regime: fastest({config: ms for (config, r), ms in found.items() if r == regime}, count)
        for regime in REGIMES
    }


def screening(screened: Times) -> list[dict[str, Any]]:
    """Return every screened configuration with its medians."""
    rows: dict[str, dict[str, Any]] = {}
    for (config, regime), value in medians(screened).items():
        rows.setdefault(config, {"config": config})[regime] = round(value, 4)
    return list(rows.values())


def regime_rows(
    times: Times, about: Mapping[str, Mapping[str, Any]], bad: Mapping[tuple[str, str], str]
) -> dict[str, list[dict[str, Any]]]:
    """Return, by regime, a row per configuration; wrong and failed ones have no figures.

    Args:
        times: times of the full rounds.
        about: schedule, grain, route and order of each configuration.
        bad: why a configuration has no figure in a regime.
    """
    rows: dict[str, list[dict[str, Any]]] = {regime: [] for regime in REGIMES}
    for (config, regime), reason in bad.items():
        row = {"config": config, **about.get(config, {}), "ok": False, "reason": reason}
        rows[regime].append(row)
    for (config, regime), found in times.items():
        if regime in rows and len(found) > 1 and (config, regime) not in bad:
            row = {"config": config, **about.get(config, {}), "ok": True, **spread(found)}
            rows[regime].append(row)
    for found_rows in rows.values():
        found_rows.sort(key=lambda row: row.get("median", float("inf")))
    return rows


def figure(rows: Sequence[Mapping[str, Any]], config: str) -> float | None:
    """Return a configuration's median, if it has one."""
    for row in rows:
        if row["config"] == config and row["ok"]:
            return float(row["median"])
    return None


def conclusions(regimes: Mapping[str, Sequence[Mapping[str, Any]]], ideal_ms: float | None) -> Any:
    """Return ficco's best point per regime, its ratios (above 1: ficco is faster), efficiency."""
    best: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    queued = [figure(regimes[regime], "torch_fused") for regime in ("eager", "captured")]
    torch_queued = min((value for value in queued if value), default=None)
    for regime in REGIMES:
        rows = regimes[regime]
        ours = [row for row in rows if row["ok"] and row["config"] not in BASELINES]
        if not ours:
            continue
        found = min(ours, key=lambda row: row["median"])
        best[regime] = {key: found[key] for key in found if key not in ("ok", "runs")}
        compared = {
            "serial": figure(rows, "serial"),
            "torch_fused": figure(rows, "torch_fused"),
            "torch_fused_better_of_eager_and_captured": (
                None if regime == "synchronized" else torch_queued
            ),
        }
        ratios[regime] = {
            name: round(value / found["median"], 3) for name, value in compared.items() if value
        }
    result: dict[str, Any] = {"best_ficco": best, "times_faster_than": ratios}
    if ideal_ms and "captured" in best:
        result["efficiency"] = round(ideal_ms / best["captured"]["median"], 3)
    return result


def ideal(regimes_alone: Times) -> dict[str, Any]:
    """Return the times of the GEMM alone, the fastest transfer alone, and the larger of the two."""
    found = {config: value for (config, _), value in medians(regimes_alone).items()}
    transfers = {name: value for name, value in found.items() if name.startswith("transfer ")}
    parts = results.ideal(found.get("gemm"), transfers.values())
    return {
        **{name: value and round(value, 4) for name, value in parts.items()},
        "transfers_ms": {n.removeprefix("transfer "): round(v, 4) for n, v in transfers.items()},
    }


def point_text(row: Mapping[str, Any] | None) -> str:
    """Return a point's short name: schedule, grain, and other requested axes."""
    if row is None:
        return "-"
    words = [str(row["schedule"]), str(row["grain"])]
    words += [str(row[axis]) for axis in ASKED if row.get(axis)]
    return " ".join(words)


def table(document: Mapping[str, Any]) -> str:
    """Return one line per case: ideal, then serial, PyTorch fused and best ficco per regime."""
    lines = [
        f"{'case':42} {'ideal':>8}  " + "  ".join(f"{regime:^58}" for regime in REGIMES),
        f"{'':42} {'':8}  " + "  ".join([f"{'serial':>8} {'fused':>8} {'ficco':>8} {'':31}"] * 3),
    ]
    for case in document["cases"]:
        cells = []
        for regime in REGIMES:
            rows = case["regimes"][regime]
            row = case["best_ficco"].get(regime)
            values = [figure(rows, name) for name in BASELINES] + [row and row["median"]]
            texts = [f"{value:8.3f}" if value else f"{'-':>8}" for value in values]
            cells.append(" ".join(texts) + f" {point_text(row):31.31}")
        best = case["ideal_ms"]
        lines.append(
            f"{case['case']:42.42} {best:8.3f}  " + "  ".join(cells)
            if best
            else f"{case['case']:42.42} {'-':>8}  " + "  ".join(cells)
        )
    lines += [f"left out: {name}" for name in document["left_out"]]
    lines += [f"failed: {entry['case']}: {entry['reason']}" for entry in document["failed"]]
    return "\n".join(lines)
