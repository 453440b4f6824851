"""bench/results/README.md: which script made which file, where and when, and what is superseded."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from modelling.tables import results_of
from naming import MACHINES, where
from tables.comparison import compared, latest
from tables.sources import MARK, Page, table, wrapped

PAGES = {  # by script: the page of docs/performance that shows its results
    "compare": "operators", "regret": "operators", "characterize": "operators", "model": "models",
    "host_cost": "calls_on_the_host", "signals": "calls_on_the_host",
    "cold_start": "calls_on_the_host", "few_rows": "few_rows", "device": "few_rows",
    "embedding": "embeddings", "grouped_gemm": "grouped_products", "dlrm": "models",
    "sweep": "sweeps", "paced": "on_a_cpu", "host": "on_a_cpu", "predict": "predictions",
    "host_predictions": "predictions", "scenarios": "predictions",
    "push_sm_predicted": "predictions", "moe": "experts",
}  # fmt: skip
SCRIPTS = {  # where the script has another name than its result
    "sweep": "keep_sweep",
    "push_sm_predicted": "sending",
}
READERS = {  # scripts that read results, and what they make
    "`readme.py`": "README, `docs/performance`, and this file",
    "`book.py`": "the books in `schedules/tuned`, from `compare_*`, `few_rows_*` and `sweep_*`",
    "`predict.py`": "`predict.json`, from `compare_*`",
}


def results_readme(page: Page) -> str:
    """Return the text of the file."""
    documents = [
        (path, json.loads(path.read_text())) for path in sorted(page.results.glob("*.json"))
    ]  # fmt: skip
    shares = _shares(page)
    earlier = tomllib.loads((page.results / "earlier.toml").read_text())
    rows = [
        [f"[{path.name}]({path.name})", _script(document), _machine(document),
         document["date"], _commit(path, document, earlier), f"[{PAGES[document['bench']]}]"
         f"(../../docs/performance/{PAGES[document['bench']]}.md)", shares.get(path.name, "all")]
        for path, document in documents
    ]  # fmt: skip
    lines = [
        MARK, "", "# Results", "",
        "This folder has the measurements on which the figures of the documentation and the "
        "shipped books rest. The table says which script of `bench` made which file, on which "
        "machine and when. It is for people who measure again, or who look up how a figure was "
        "made. Each file has the versions, the driver, the settings and the date at its head.", "",
        "A name is SCRIPT_MACHINE or SCRIPT_MACHINE_LABEL. The machine `h200x4` is 4 H200s; "
        "`h200x2_by_8` is 8 ranks that share 2 H200s. Files without a machine were made on a CPU.",
        "",
        "The column *shown* says how much of a file the pages show. If several files have the same "
        "shape, or the same step and variant, the latest file counts, and for equal dates the last "
        "one by name (for models, the first). A file is *superseded* if other files replaced all "
        "of it. Superseded files stay where notes or profiles cite them; `predict.py` reads files "
        "in the order of their names, without dates.", "",
        "The column *commit* has the commit whose code was measured; `+changes` means that tracked "
        "files differed from it. Results from before 2026-11-29 do not name it: for them the "
        "column has the commit that *added* the file ([earlier.toml](earlier.toml)).", "",
        *table(["file", "script", "machine", "date", "commit", "page", "shown"], rows), "",
        "Figures (`.svg`) are drawn from the JSON file with the same beginning: `*_gains.svg` and "
        "`*_map.svg` by `keep_sweep.py`, `characterize_*.svg` by `characterize.py --draw`, and "
        "`auto_*.svg` by `readme.py` from `regret_*.json`.", "",
        "These scripts read the files:", "",
        *table(["script", "what it makes"], [list(row) for row in READERS.items()]), "",
        "`reports` has files of `ficco doctor --report`, by machine.",
    ]  # fmt: skip
    return "\n".join(wrapped(lines)) + "\n"


def _script(document: dict[str, Any]) -> str:
    """Return the script, with the operator or the grid where there are several."""
    bench = document["bench"]
    options = " --op all_gather_matmul" if document.get("op") == "all_gather_matmul" else ""
    grid = f", grid `{document['grid']}`" if bench == "sweep" else ""
    return f"`{SCRIPTS.get(bench, bench)}.py{options}`{grid}"


def _commit(path: Path, document: dict[str, Any], earlier: dict[str, str]) -> str:
    """Return the measured commit, or "added in ..." for a result that does not name it."""
    measured, _, changed = str(document.get("commit", "")).partition("+")
    if measured:
        return f"`{measured[:8]}`" + (" +changes" if changed else "")
    return f"added in `{earlier[path.name]}`"


def _machine(document: dict[str, Any]) -> str:
    """Return the machine of a result in words."""
    gpus = document.get("gpus")
    if not gpus:
        return f"{document['cpu']}, {document['cores']} cores"
    return where({**document, "world": document.get("world") or len(gpus)})


def _shares(page: Page) -> dict[str, str]:
    """Return how much of a file the pages show, for files that others may replace."""
    found = {}
    for machine in MACHINES:
        documents = compared(page, machine)
        counted = list(latest(documents).values())
        for index, (path, document) in enumerate(documents):
            found[path.name] = _share(counted.count(index), len(document["cases"]), "shapes")
    for paths, _ in results_of(page.results):
        used = _used_variants(paths)
        for path in paths:
            document = json.loads(path.read_text())
            every = sum(len(cell["variants"]) for cell in document["cells"])
            found[path.name] = _share(used[path], every, "variants of steps")
    return found


def _used_variants(paths: list[Path]) -> dict[Path, int]:
    """Return how many variants of steps count, by file; `paths` is in the order of results_of."""
    known: set[tuple[Any, ...]] = set()
    used = dict.fromkeys(paths, 0)
    for path in paths:
        for cell in json.loads(path.read_text())["cells"]:
            for variant in cell["variants"]:
                key = (cell["mode"], cell["model"], cell["tokens"], variant)
                used[path] += key not in known
                known.add(key)
    return used


def _share(used: int, every: int, unit: str) -> str:
    if used == every:
        return "all"
    return f"{used} of {every} {unit}" if used else "superseded"
