"""Writes README's tables from bench/results. `--check` only says whether they are up to date."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from comparing.few import few_rows_table
from modelling.tables import headline, model_section

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
LINE = "<!-- models:begin -->", "<!-- models:end -->"  # around one line on whole models


def where(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"{result['cpu']}, {result['cores']} cores; {versions}; {result['date']}"


def paced_tables(result: dict[str, Any]) -> list[str]:
    lines = []
    runs = {run["machine"]: run for run in result["runs"]}
    first = next(iter(runs.values()))
    lines += [
        f"All-gather + matmul, m={first['m']} n={first['n']} k={first['k']} {first['dtype']}, "
        "**paced**: real copies and GEMMs, lengthened to the profiles' rates. Milliseconds, median "
        f"of {first['rows'][0]['ms']['runs']}, with the speed-up over `serial` "
        "([`bench/results/paced.json`](bench/results/paced.json)):",
        "",
        "| schedule | " + " | ".join(f"`{name}`" for name in runs) + " |",
        "|---" * (len(runs) + 1) + "|",
    ]
    for index, row in enumerate(first["rows"]):
        cells = []
        for run in runs.values():
            best = max(other["speedup"] for other in run["rows"])
            found = run["rows"][index]
            text = f"{found['ms']['median']:.1f} ({found['speedup']:.2f}x)"
            cells.append(f"**{text}**" if found["speedup"] == best else text)
        lines.append(f"| `{row['schedule']}` | " + " | ".join(cells) + " |")
    lines += [
        "",
        "On a full mesh shard-level overlap leaves all links but one idle and loses to `serial`;",
        "cut finer, every transfer uses every link. On a switch a rank's port is busy either way.",
    ]
    return lines


def host_table(result: dict[str, Any]) -> list[str]:
    ratio = min(entry["ratio"] for entry in result["copies"])
    lowering = max(value["median"] for value in result["lower_rank_ms"].values())
    proof = max(value["median"] for value in result["verify_s"].values())
    return [
        "What the machinery costs on a CPU "
        "([`bench/results/host.json`](bench/results/host.json), medians; the worst schedule):",
        "",
        "| what | measured |",
        "|---|---|",
        f"| chunks of 1 MiB and more, of plain memcpy's rate | {ratio:.0%} |",
        f"| handing 64 steps to a lane | {result['submit_64_steps_us']['median']:.1f} us |",
        f"| lowering one rank of 8 at grain 8 | {lowering:.2f} ms |",
        f"| proving all 8 | {1e3 * proof:.0f} ms |",
        f"| a never-seen m, lowered and bound, 4 ranks at grain 4 | {unseen(result, '4 ranks')} |",
        f"| the same, 8 ranks at grain 8 | {unseen(result, '8 ranks, grain 8')} |",
        f"| `import ficco` | {1e3 * result['import_s']['median']:.0f} ms |",
        "",
        f"Both on {where(result)}.",
    ]


def unseen(result: dict[str, Any], which: str) -> str:
    found = [v["median"] for name, v in result["never_seen_m_ms"].items() if which in name]
    return f"{min(found):.2f} to {max(found):.2f} ms, by operator"


def comparison(results: Path) -> list[str]:
    """Return the tables of compare_x*.json and host_cost_x*.json; none without the former."""
    found = {world: sorted(results.glob(f"compare_x{world}*.json")) for world in (8, 4, 2)}
    documents = {
        world: [(path, json.loads(path.read_text())) for path in paths]
        for world, paths in found.items()
        if paths
    }
    if not documents:
        return []
    runs = min(
        (row["runs"] for several in documents.values() for _, document in several
         for case in document["cases"] for row in case["regimes"]["captured"] if row["ok"]),
        default=0,
    )  # fmt: skip
    lines = [
        "### On GPUs",
        "",
        "Milliseconds a call of the slowest rank, bfloat16, medians of "
        f"{runs} interleaved runs or more, inputs rotated beyond the L2. `serial` is NCCL, then "
        "`torch.mm`; *fused* is PyTorch's `symm_mem` operator; *ideal* is the larger of the GEMM "
        "alone and the transfer alone; of ficco's points the best is shown. In brackets: times "
        "faster than `serial` and than *fused*; below 1 ficco loses. The fastest is bold. "
        "**NCCL runs without NVLink multicast here**, as all else does.",
        "",
    ]
    for number, (world, several) in enumerate(documents.items()):
        table = compare_table(several)
        if number:
            title = f"{world} GPUs"
            table = [f"<details><summary>{title}</summary>", "", *table, "", "</details>"]
        lines += [*table, "", *grain_tables([document for _, document in several])]
    for world in (8, 4, 2):
        path = results / f"host_cost_x{world}.json"
        if path.exists():
            lines += [*host_cost_table(path, json.loads(path.read_text())), ""]
            break
    for world in (8, 4, 2):
        path = results / f"few_rows_x{world}.json"
        if path.exists():
            lines += [*few_rows_table(path, json.loads(path.read_text()), where), ""]
            break
    return lines


Documents = list[tuple[Path, dict[str, Any]]]  # of one number of GPUs


def compare_table(documents: Documents) -> list[str]:
    """Return one table of several runs; a case stands as the last of them has it."""
    document = documents[-1][1]
    sources = [
        f"[`bench/results/{path.name}`](bench/results/{path.name}): {gpu_of(found)}; {where(found)}"
        for path, found in documents
    ]
    lines = [
        f"{document['world']} GPUs, m x n x k ({'. '.join(sources)}):",
        "",
        "| operator, shape | ideal | captured: serial, fused, ficco | back to back | "
        "synchronized each call |",
        "|---|---|---|---|---|",
    ]
    cases = {case["case"]: case for _, found in documents for case in found["cases"]}
    for case in sorted(cases.values(), key=lambda case: case["op"]):
        ideal = f"{case['ideal_ms']:.3f}" if case["ideal_ms"] else "-"
        each = " on each rank" if case["m_is"] == "rows on each rank" else ""
        shape = f"{case['m']}{each} x {case['n']} x {case['k']}"
        regimes = ("captured", "eager", "synchronized")
        cells = [regime_cell(case, regime) for regime in regimes]
        lines.append(f"| `{case['op']}` {shape} | {ideal} | " + " | ".join(cells) + " |")
    reasons = {name: "no time was left" for _, found in documents for name in found["left_out"]}
    reasons |= {f["case"]: "failed" for _, found in documents for f in found["failed"]}
    missing = [(name, why) for name, why in reasons.items() if name not in cases]
    if missing:
        lines += ["", "Not measured: " + ", ".join(f"{name} ({why})" for name, why in missing)]
    return lines


PUSHES = {  # how pushes of hetero_unfused_1d follow one another: what a point's name holds
    "one peer at a time, step by step": "rotation by_step",
    "in step with what arrives": "rotation by_step in_step",
    "one peer at a time, shard by shard": "rotation by_peer",
    "shard by shard, in step": "rotation by_peer in_step",
    "all peers at once": "all_peers by_step",
}


def grain_tables(documents: list[dict[str, Any]]) -> list[str]:
    """Return time against grain, of the cases that were measured with every route and order."""
    lines: list[str] = []
    for case in [case for document in documents for case in document["cases"]]:
        found = {row["config"]: row for row in case["screened"]}
        grains = [g for g in (1, 2, 4, 8) if f"hetero_unfused_1d g{g} all_peers by_step" in found]
        if len(grains) < 2:
            continue
        lines += [
            f"| `{case['op']}` {case['m']} x {case['n']} x {case['k']} | "
            + " | ".join(f"grain {g}" for g in grains) + " |",
            "|---" * (len(grains) + 1) + "|",
        ]  # fmt: skip
        for title, words in PUSHES.items():
            rows = [found.get(f"hetero_unfused_1d g{g} {words}") for g in grains]
            if any(rows):
                cells = [f"{row['captured']:.3f}" if row else "" for row in rows]
                lines.append(f"| {title} | " + " | ".join(cells) + " |")
        lines.append("")
    if not lines:
        return []
    return [
        f"Time against grain, {documents[0]['world']} GPUs: `hetero_unfused_1d`, captured, in "
        "milliseconds. These are the medians of a few screening runs, good to some per cent:",
        "",
        *lines,
    ]


def regime_cell(case: dict[str, Any], regime: str) -> str:
    """Return serial, fused and best ficco in one cell, the fastest in bold."""
    medians = {row["config"]: row["median"] for row in case["regimes"][regime] if row["ok"]}
    best = case["best_ficco"].get(regime)
    shown = [medians.get("serial"), medians.get("torch_fused"), best and best["median"]]
    winner = min((value for value in shown if value), default=None)
    texts = ["-" if not value else f"{value:.3f}" for value in shown]
    texts = [
        f"**{text}**" if value and value == winner else text
        for text, value in zip(texts, shown, strict=True)
    ]
    if not best:
        return ", ".join(texts)
    axes = [best.get(axis) for axis in ("grain", "asked_route", "asked_order", "asked_pace")]
    point = " ".join([f"`{best['schedule']}`", *[str(axis) for axis in axes if axis]])
    faster = case["times_faster_than"][regime]
    ratios = [f"{faster[name]:.2f}x" for name in ("serial", "torch_fused") if name in faster]
    return f"{', '.join(texts)} {point} ({', '.join(ratios)})"


def gpu_of(document: dict[str, Any]) -> str:
    gpus = document["gpus"]
    if not gpus:
        return "GPU"
    return f"{gpus[0]['name']}, driver {gpus[0]['driver_version']}, {gpus[0]['power.limit']}"


def host_cost_table(path: Path, document: dict[str, Any]) -> list[str]:
    parts = {
        "public": "whole call", "native": "of it native", "torch": "torch's calls",
        "around": "around them", "serial": "serial", "torch_fused": "fused",
    }  # fmt: skip
    lines = [
        f"What a call costs the host, microseconds, one chunk a shard on {document['world']} GPUs "
        f"([`bench/results/{path.name}`](bench/results/{path.name}), medians; {where(document)}):",
        "",
        "| operator, shape, schedule | " + " | ".join(parts.values()) + " |",
        "|---" * (len(parts) + 1) + "|",
    ]
    for case in document["cases"]:
        medians = [case["us"][part].get("median") for part in parts]
        figures = [f"{value:.0f}" if value else "-" for value in medians]
        shape = f"{case['m']} x {case['n']} x {case['k']}, `{case['schedule']}`"
        lines.append(f"| `{case['op']}` {shape} | " + " | ".join(figures) + " |")
    return lines


def foresight(results: Path) -> list[str]:
    """Return what predict.json says of predictions, and scenarios.json of the paper's shapes."""
    lines: list[str] = []
    path = results / "predict.json"
    if path.exists():
        lines += prediction_table(path, json.loads(path.read_text()))
    path = results / "scenarios.json"
    if path.exists():
        lines += ["", *scenario_table(path, json.loads(path.read_text()))]
    path = results / "characterize_x4.svg"
    if path.exists():
        lines += [
            "",
            "What cutting a GEMM loses (DIL) and what GEMM and transfer lose side by side (CIL), "
            f"4 GPUs ([`bench/results/characterize_x4.json`](bench/results/{path.stem}.json)):",
            "",
            f"![DIL and CIL on H200](bench/results/{path.name})",
        ]
    return lines


def prediction_table(path: Path, document: dict[str, Any]) -> list[str]:
    lines = [
        "### Predicted against measured",
        "",
        "Every schedule and grain of the shapes above, predicted from the profiles "
        f"`{'`, `'.join(document['profiles'])}` ([`bench/results/{path.name}`](bench/results/"
        f"{path.name}); {document['date']}). No shape that judges is in a profile: GEMMs there "
        "have other m. Errors are of medians; a choice is right within 3% of the best measured "
        "schedule (in brackets: so many), or within the interquartile range of the two. 8 GPUs "
        "were not measured.",
        "",
        "| calls | by | schedules | median error | 90th percentile | right choices | slower than "
        "`serial` by 3% |",
        "|---" * 7 + "|",
    ]
    parts = {f"captured, {world} GPUs": part for world, part in document["by_world"].items()}
    parts |= {
        {"eager": "back to back", "synchronized": "synchronized each"}[regime]: part
        for regime, part in document["by_regime"].items()
        if regime != "captured"
    }
    for title, part in parts.items():
        for method in ("simulator", "rule"):
            found = part[method]
            lines.append(
                f"| {title} | {method} | {found['errors']['count']} | "
                f"{found['errors']['median']:.1%} | {found['errors']['p90']:.1%} | "
                f"{found['choices_right']} ({found['choices_within_3_percent']}) of "
                f"{part['cases']} | {found['slower_than_serial']} |"
            )
    return lines


def scenario_table(path: Path, document: dict[str, Any]) -> list[str]:
    lines = [
        "### Simulated: the paper's 16 scenarios on 8 MI300X",
        "",
        f"**Nothing of this ran; every figure here is simulated.** `{document['machine']}`: "
        f"{document['source']}. All-gather + matmul, bfloat16, grain {document['grain']}, calls in "
        f"a graph ([`bench/results/{path.name}`](bench/results/{path.name}); the same shapes with "
        "all grains: `ficco sweep paper_mi300x --out DIR`). Assumed is:",
        "",
        *(f"- {text}" for text in document["assumptions"]),
        "",
        "Times as fast as serial, geometric mean over the scenarios (least to most):",
        "",
    ]
    plain = [part for part in document["summary"] if part["variant"] == "as assumed"]
    readings = [part["reading"] for part in plain]
    lines += ["| schedule | " + " | ".join(readings) + " |", "|---" * (len(readings) + 1) + "|"]
    for name in plain[0]["schedules"]:
        cells = []
        for part in plain:
            found = part["schedules"][name]
            cells.append(f"{found['geomean']:.2f} ({found['least']:.2f} to {found['most']:.2f})")
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    lines += ["", *scenario_rows(document), "", *sensitivity(document["summary"]), ""]
    for part in document["rule"]:
        lines.append(
            f"Where {part['reading']}, the selector's rule is within 3% of the fastest candidate, "
            f"as simulated on the same profile, in {part['right']} of {part['scenarios']} "
            f"scenarios; it loses {part['lost_most']:.1%} at most and is {part['geomean']:.3f} "
            f"times as fast as serial, of {part['fastest_geomean']:.3f} that there are."
        )
    return lines


def scenario_rows(document: dict[str, Any]) -> list[str]:
    """Return a folded table of the scenarios: shard level against FiCCO, and the rule's choice."""
    rows = [row for row in document["rows"] if "rule" in row]
    lines = [
        "<details><summary>Each scenario: times as fast as serial, shard level against FiCCO, and "
        "what the rule takes (simulated)</summary>",
        "",
        "| scenario, m x n x k over all GPUs | serial, ms | ideal | shard level | FiCCO's best | "
        "over shard level | gated | the rule takes | it loses |",
        "|---" * 9 + "|",
    ]
    for row in rows:
        best, speedup, rule = row["best_ficco"], row["speedup"], row["rule"]
        lines.append(
            f"| {row['id']}, {row['m']} x {row['n']} x {row['k']} | {row['ms']['serial']:.2f} | "
            f"{row['ideal']:.2f} | {speedup['shard_p2p']:.2f} | {speedup[best]:.2f} `{best}` | "
            f"{row['best_over_shard_level']:.2f} | {speedup['gated_1d']:.2f} | "
            f"`{rule['takes']}` | {rule['lost']:.1%} |"
        )
    return [*lines, "", "</details>"]


def sensitivity(summary: list[dict[str, Any]]) -> list[str]:
    """Return a table of what moves when one assumption does."""
    lines = [
        "How much hangs on what is assumed: one assumption moved at a time; FiCCO is the best of "
        "the paper's four schedules (simulated):",
        "",
        "| n | moved | ideal, at most | FiCCO, at most | FiCCO, geometric mean | shard level | "
        "gated | FiCCO ahead of shard level |",
        "|---" * 8 + "|",
    ]
    lines += [
        f"| {part['reading'].removeprefix('n is ')} | {part['variant']} | "
        f"{part['ideal_most']:.2f}x | {part['ficco_most']:.2f}x | {part['ficco_geomean']:.2f}x | "
        f"{part['schedules']['shard_p2p']['geomean']:.2f}x | "
        f"{part['schedules']['gated_1d']['geomean']:.2f}x | "
        f"{part['ahead_of_shard_level']} of {part['scenarios']} |"
        for part in summary
    ]
    return lines


def rendered() -> str:
    """Return README with its tables made anew."""
    results = ROOT / "bench" / "results"
    paced = json.loads((results / "paced.json").read_text())
    host = json.loads((results / "host.json").read_text())
    lines = ["## Measured", "", *paced_tables(paced), "", *host_table(host)]
    if on_gpus := comparison(results):
        lines += ["", *on_gpus[:-1]]
    if models := model_section(results, where, gpu_of):
        lines += ["", *models]
    if foreseen := foresight(results):
        lines += ["", *foreseen]
    body = "\n".join(lines)
    text = (ROOT / "README.md").read_text()
    head, rest = text.split(BEGIN)
    text = f"{head}{BEGIN}\n{body}\n{END}{rest.split(END)[1]}"
    head, rest = text.split(LINE[0])
    return f"{head}{LINE[0]}{headline(results)}{LINE[1]}{rest.split(LINE[1])[1]}"


def main() -> int:
    if "--check" in sys.argv[1:]:
        return int(rendered() != (ROOT / "README.md").read_text())
    (ROOT / "README.md").write_text(rendered())
    return 0


if __name__ == "__main__":
    sys.exit(main())
