"""The two pages with figures: README's part, and bench/RESULTS.md with the rest."""

from __future__ import annotations

from comparing.few import few_rows_gains, few_rows_table
from comparing.regrets import regret_lines
from modelling.tables import METHOD, model_sections, results_of
from modelling.tables import headline as models_headline
from naming import MACHINES, SHARED, machine_name, where

from tables import comparison
from tables.comparison import captured_table, compared, eager_table, grain_tables, not_measured
from tables.foresight import prediction_table
from tables.on_cpus import machinery_table, paced_table, posed_in
from tables.scenarios import scenario_section, scenario_summary
from tables.sources import Documents, Page, folded, machine_of, machines, read, wrapped
from tables.swept import swept_lines

HOW = (
    "Milliseconds a call of the slowest rank, bfloat16, medians of {runs} interleaved runs or "
    "more, inputs rotated beyond the L2. `serial` is NCCL, then `torch.mm`; *fused* is PyTorch's "
    "`symm_mem` operator; *ideal* is the larger of the GEMM alone and the transfer alone. The "
    "fastest is bold; gains are times faster than the two: below 1 ficco loses. **NCCL runs "
    "without NVLink multicast here**, as all else does."
)
FEW_ROWS = ("few_rows", "few_rows_gather")  # results of few_rows.py
PLOTS = ("gains", "map")  # of keep_sweep.py
SHARING = (
    "A GPU runs the processes of its ranks in turns here, so that its own times mean nothing. The "
    "host enqueues what a call of so many ranks has; more processes at once slow it down, "
    "too, as the part in Python shows, which is the same for any number of ranks."
)
POINT = (
    "Of ficco's points the best of the shape stands here, with its grain, and its route, order and "
    "pace where they are not the machine's own."
)


def headline(page: Page) -> str:
    """Return a summary of the measurements, in a line or two."""
    said = " ".join(filter(None, (comparison.headline(page), models_headline(page.results))))
    return "\n".join(wrapped([said]))


def readme_part(page: Page) -> list[str]:
    """Return the lines for README between its marks."""
    machine = first_machine(page)
    lines = ["## Measured", ""]
    if machine:
        documents = compared(page, machine)
        lines += [
            f"On {where(documents[0][1])}. {HOW.format(runs=comparison.runs_of(documents))}", "",
            "Geometric means over the shapes of each operator, over `serial` and over *fused*:", "",
            *comparison.summary(page, machine), "",
            f"Captured, in a CUDA graph. {POINT}", "",
            *captured_table(page, machine), *not_measured(documents), "",
            *folded("Back to back, and synchronized each call", eager_table(page, machine)), "",
        ]  # fmt: skip
    lines += [*_models(page), *_host_cost(page), *_few_rows_gains(page), *_swept(page)]
    if machine:
        lines += ["All of these on:", "", *machines(_on_gpus(page, machine), page), ""]
    lines += [*_paced(page), *_simulated(page)]
    lines += [
        "[`bench/RESULTS.md`](bench/RESULTS.md) has the rest: other GPUs, time against grain, few "
        "rows layer by layer, what the machinery costs on a CPU, how good predictions are, each "
        "simulated scenario, and what cutting a GEMM loses.",
    ]
    return wrapped(lines)


def results_page(page: Page) -> list[str]:
    """Return all lines of bench/RESULTS.md."""
    most = first_machine(page)
    lines = [
        "# Results", "",
        "What README does not show of [`bench/results`](results). Written by `bench/readme.py`; a "
        "script of [`bench`](.) made each result.", "",
    ]  # fmt: skip
    for machine in MACHINES:
        documents = compared(page, machine)
        if documents and machine != most:
            how = HOW.format(runs=comparison.runs_of(documents))
            lines += [
                f"## {where(documents[0][1])}", "", how, "", f"Captured. {POINT}", "",
                *captured_table(page, machine), *not_measured(documents), "",
                "Back to back, and synchronized each call:", "", *eager_table(page, machine), "",
                *machines(documents, page), "",
            ]  # fmt: skip
        if grains := grain_tables(documents):
            lines += [
                f"## Time against grain, {where(documents[0][1])}", "",
                "`hetero_unfused_1d`, captured, in milliseconds. These are the medians of a few "
                f"screening runs, good to some per cent ({page.links(documents)}).", *grains, "",
            ]  # fmt: skip
    parts = (_few_rows, _regrets, _machinery, _foresight)
    return wrapped([*lines, *(line for part in parts for line in part(page))][:-1])


def first_machine(page: Page) -> str:
    """Return the machine with the most GPUs that has a comparison of operators; "" if none."""
    return next((machine for machine in MACHINES if compared(page, machine)), "")


def _on_gpus(page: Page, machine: str) -> Documents:
    models = [
        path
        for paths, document in results_of(page.results)
        if machine_name(document) == machine
        for path in paths
    ]
    names = ("host_cost", *FEW_ROWS, "sweep", "sweep_all_reduce")
    others = [page.results / f"{name}_{machine}.json" for name in names]
    return [*compared(page, machine), *read([*models, *others])]


def _every(page: Page, name: str) -> Documents:
    """Return the results of a name, the most GPUs first."""
    return read(page.results / f"{name}_{machine}.json" for machine in MACHINES)


def _first(page: Page, name: str) -> Documents:
    """Return a list with the result of a name with the most GPUs; empty if there is none."""
    return _every(page, name)[:1]


def _models(page: Page) -> list[str]:
    """Return tables of whole models: the machine with the most GPUs, the others folded."""
    lines: list[str] = []
    for i, (paths, machine, table) in enumerate(model_sections(page.results)):
        if i:
            links = ", ".join(page.link(path) for path in paths)
            said = [*wrapped([f"Milliseconds a layer ({links})."]), "", *table]
            lines += [*folded(f"The same on {machine}", said), ""]
        else:
            lines += [f"Milliseconds a layer on {machine}. {METHOD}", "", *table, ""]
    return ["### Blocks of Llama 3", "", *lines] if lines else []


def _host_cost(page: Page) -> list[str]:
    lines: list[str] = []
    shared = [page.results / f"host_cost_{machine}.json" for machine in SHARED]
    for i, (path, document) in enumerate([*_every(page, "host_cost"), *read(shared)]):
        machine, day = where(document), document["date"]
        table = [
            f"Microseconds, medians, one chunk a shard on {machine} ({day}):", "",
            *comparison.host_cost_table(document), "",
        ]  # fmt: skip
        if apart := comparison.host_cost_apart(document):
            table += [
                "Apart: the first of ten calls after a wait for the GPU, the custom operator that "
                "compiled code calls, a call whose gradient autograd records, and a backward pass "
                "of that call alone, which autograd hands to another thread and back:",
                "", *apart, "",
            ]  # fmt: skip
        if document.get("shared_gpus"):
            table = [*wrapped([SHARING]), "", *table]
        if i:
            table += machines([(path, document)], page)
            lines += [*folded(f"The same on {machine}, {day}", table), ""]
        else:
            lines += ["### What a call costs the host", "", *table]
    return lines


def _few_rows_gains(page: Page) -> list[str]:
    lines: list[str] = []
    for name in FEW_ROWS:
        for _, document in _every(page, name):
            lines += [*few_rows_gains(document), ""]
    return ["### Few rows", "", *lines] if lines else []


def _few_rows(page: Page) -> list[str]:
    lines: list[str] = []
    for name in FEW_ROWS:
        for path, document in _every(page, name):
            lines += [*few_rows_table(document), "", *machines([(path, document)], page), ""]
    return ["## Few rows", "", *lines] if lines else []


def _regrets(page: Page) -> list[str]:
    """Return the quality of `auto` on random shapes, on every machine."""
    lines: list[str] = []
    for path, document in _every(page, "regret"):
        lines += [*regret_lines(document, where(document)), ""]
        lines += [*machines([(path, document)], page), ""]
    return ["## `auto` on shapes that no book holds", "", *lines] if lines else []


def _paced(page: Page) -> list[str]:
    lines: list[str] = []
    for path, document in read([page.results / "paced.json"]):
        lines += [
            "### Paced, on a CPU", "",
            f"Real copies and GEMMs, lengthened to the profiles' rates: {posed_in(document)}, with "
            f"the speed-up over `serial` ({page.link(path)}; {machine_of(document)}):", "",
            *paced_table(document), "",
            "On a full mesh shard-level overlap leaves all links but one idle and loses to "
            "`serial`; cut finer, every transfer uses every link. On a switch a rank's port is "
            "busy either way.", "",
        ]  # fmt: skip
    return lines


def _machinery(page: Page) -> list[str]:
    lines: list[str] = []
    for path, document in read([page.results / "host.json"]):
        lines += [
            "## What the machinery costs on a CPU", "",
            f"Medians, of the worst schedule ({page.link(path)}; {machine_of(document)}):", "",
            *machinery_table(document), "",
        ]  # fmt: skip
    return lines


def _swept(page: Page) -> list[str]:
    """Return the results of sweeps: the most GPUs with plots, the others folded.

    Layers without sequence parallelism have a separate grid.
    """
    names = [f"sweep_{grid}{machine}.json" for grid in ("", "all_reduce_") for machine in MACHINES]
    found = read(page.results / name for name in names)
    lines: list[str] = ["### Swept", ""] if found else []
    for i, (path, document) in enumerate(found):
        machine, (gains, winners) = where(document), (f"{path.stem}_{p}.svg" for p in PLOTS)
        said = [
            *swept_lines(document, page.link(path)), "",
            page.picture(f"Speed-up over serial of every shape, {machine}", gains), "",
            page.picture(f"Which schedule wins where, {machine}", winners),
        ]  # fmt: skip
        what = "All-reduce" if document["grid"] == "all_reduce" else "The same"
        lines += [*(folded(f"{what} on {machine}", said) if i else said), ""]
    return lines


def _simulated(page: Page) -> list[str]:
    lines: list[str] = []
    for path, document in read([page.results / "scenarios.json"]):
        lines += [
            "### Simulated: the paper's 16 scenarios on 8 MI300X", "",
            *scenario_summary(document, page.link(path)), "",
        ]  # fmt: skip
    return lines


def _foresight(page: Page) -> list[str]:
    lines: list[str] = []
    for path, document in read([page.results / "predict.json"]):
        lines += [
            "## Predicted against measured", "",
            "Every schedule and grain of the shapes compared on GPUs, predicted from the profiles "
            f"`{'`, `'.join(document['profiles'])}` ({page.link(path)}; {document['date']}). No "
            "shape that judges is in a profile: GEMMs there have other m. Errors are of medians; a "
            "choice is right within 3% of the best measured schedule (in brackets: so many), or "
            "within the interquartile range of the two. 8 GPUs were not measured.", "",
            *prediction_table(document), "",
        ]  # fmt: skip
    for path, document in read([page.results / "scenarios.json"]):
        lines += [
            "## Simulated: the paper's 16 scenarios on 8 MI300X", "",
            *scenario_section(document, page.link(path)), "",
        ]  # fmt: skip
    for path, document in _first(page, "characterize"):
        if path.with_suffix(".svg").exists():
            lines += [
                "## What cutting a GEMM loses", "",
                "DIL, and what GEMM and transfer lose side by side, CIL, on "
                f"{where(document)} ({page.link(path)}; {machine_of(document)}):", "",
                page.picture("DIL and CIL on H200", f"{path.stem}.svg"), "",
            ]  # fmt: skip
    return lines
