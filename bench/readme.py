"""Writes README's tables from bench/results. `--check` only says whether they are up to date."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


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


def rendered() -> str:
    """Return README with its tables made anew."""
    results = ROOT / "bench" / "results"
    paced = json.loads((results / "paced.json").read_text())
    host = json.loads((results / "host.json").read_text())
    body = "\n".join(["## Measured", "", *paced_tables(paced), "", *host_table(host)])
    text = (ROOT / "README.md").read_text()
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{body}\n{END}{rest.split(END)[1]}"


def main() -> int:
    if "--check" in sys.argv[1:]:
        return int(rendered() != (ROOT / "README.md").read_text())
    (ROOT / "README.md").write_text(rendered())
    return 0


if __name__ == "__main__":
    sys.exit(main())
