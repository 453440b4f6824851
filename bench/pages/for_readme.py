"""The two parts of README: a headline, and one table with one figure."""

from __future__ import annotations

from typing import Any

from modelling.tables import gain_text, losses, merged, results_of, step_name
from naming import machine_name, where
from tables import auto, chart
from tables.sources import Document, Page, table, wrapped

from ficco.report.sweep.judging import geomean

SUMMARY = "docs/performance/summary.md"
REGIMES = ("captured", "eager")
STEPS = (  # rows of README's table
    ("training", "70B", 8192), ("prefill", "70B", 8192), ("prefill_tp", "70B", 8192),
    ("decode", "70B", 1),
)  # fmt: skip
MODELS = "h200x4"


def headline(page: Page) -> str:
    """Return sentences on what `auto` gives for operators and for a model."""
    said = []
    for _, document in page.newest("regret")[:1]:
        cases = document["cases"]
        captured, eager = (auto.gains(cases, regime, auto.NCCL) for regime in REGIMES)
        hand = [geomean(auto.gains(cases, regime, auto.BEST)) or 0.0 for regime in REGIMES]
        said.append(
            f"On {len(cases)} random shapes on {where(document)}, calls with `auto` are "
            f"{auto.spread_text(captured)} as fast as NCCL and `torch.mm` in CUDA graphs, and "
            f"{auto.spread_text(eager)} in eager mode: the geometric mean, the worst and the best "
            f"shape. Against the fastest hand-written call: {hand[0]:.2f}x in graphs, "
            f"{hand[1]:.2f}x eager."
        )
    for document in models_of(page):
        rows = merged(document)[STEPS[0]]
        step = step_name(*STEPS[0]).removeprefix("training, ")
        said.append(
            f"A training step of Llama 3 blocks ({step}) on {where(document)} is "
            f"{gain_text(rows, 'eager over eager')} as fast as with PyTorch's tensor and sequence "
            f"parallelism, or {gain_text(rows, 'best over best')} with the best variant of each."
        )
    return "\n".join(wrapped([" ".join(said)]))


def results(page: Page) -> list[str]:
    """Return the section with the table and the figure."""
    [(path, document), *_] = page.newest("regret")
    [models] = models_of(page)
    lost, compared = losses(models, "compiled over compiled")
    lines = [
        "## Performance", "",
        "What `auto` gives, as speed-ups: geometric mean (worst to best shape). Below 1 ficco is "
        "slower.", "",
        *compact_table(document, models), "",
        "*Best by hand* is the fastest of NCCL and `torch.mm`, PyTorch's fused operators, and "
        "`torch.mm` with an all-reduce of PyTorch's symmetric memory. *Best over best* compares "
        "the fastest of eager, graph and `torch.compile` of both sides. With `torch.compile` on "
        f"both sides, ficco is slower in {lost} of {compared} steps.", "",
        page.picture(
            f"Speed-up of auto over NCCL and torch.mm of every shape, {where(document)}",
            chart.file_of(path).name,
        ), "",
        f"{_machine(document)}, {document['date']}, and {_machine(models)}, {models['date']}; "
        f"{_versions(document)}; NCCL without NVLink multicast. [Performance]({SUMMARY}) has all "
        "tables, the method, and the cases in which ficco is slower.",
    ]  # fmt: skip
    return wrapped(lines)


def compact_table(document: Document, models: Document) -> list[str]:
    """Return the table of operators and of steps of models."""
    rows = auto.gain_rows(document, REGIMES)
    pairs = ("graph over graph", "best over best", "eager over eager")
    rows.append([
        f"**`ficco.overlap`, Llama 3, {where(models)}**", "**graph over PyTorch's graph**",
        "**best over PyTorch's best**", "**eager over PyTorch's eager**", "",
    ])  # fmt: skip
    steps = merged(models)
    for step in STEPS:
        rows.append([step_name(*step), *[gain_text(steps[step], pair) for pair in pairs], "-"])
    head = [f"`auto`, {len(document['cases'])} shapes, {where(document)}"]
    for regime in ("in a CUDA graph", "eager"):
        head += [f"{regime}, over NCCL and `torch.mm`", f"{regime}, over the best by hand"]
    return table(head, rows)


def models_of(page: Page) -> list[Document]:
    return [
        document for _, document in results_of(page.results) if machine_name(document) == MODELS
    ]  # fmt: skip


def _machine(document: dict[str, Any]) -> str:
    gpu = document["gpus"][0]
    return f"{document['world']} {gpu['name']} (driver {gpu['driver_version']})"


def _versions(document: dict[str, Any]) -> str:
    versions = document["versions"]
    return f"PyTorch {versions['torch']}, NCCL {versions['nvidia-nccl-cu13']}"
