"""The parts of README and the quickstart that results determine."""

from __future__ import annotations

import textwrap

from modelling.tables import losses as lost_steps
from modelling.tables import results_of
from naming import machine_name, where
from tables import auto, chart, experts, gains, losses
from tables.sources import WIDTH, Document, Page, read, table, wrapped

SUMMARY = "docs/performance/summary.md"
REGIMES = ("captured", "eager")
MODELS = "h200x4"
OVERLAP = "`ficco.overlap(model)`"
PROGRAMS = {  # by mode of steps: a program in words, and what to do
    "decode": (
        "decode, tensor parallel",
        f"{OVERLAP}, then [capture a CUDA graph](docs/tutorials/serve_with_cuda_graphs.md)",
    ),
    "serving": ("serve prompts of any length", OVERLAP),
    "training": (
        "train, tensor and sequence parallel",
        f"{OVERLAP}: [tutorial](docs/tutorials/pytorch_tensor_parallel.md)",
    ),
    "prefill": ("prefill, with sequence parallelism", OVERLAP),
    "prefill_tp": (
        "prefill, without sequence parallelism",
        f"{OVERLAP}: [Hugging Face](docs/tutorials/hugging_face.md)",
    ),
}
NOTES = (
    "Speed-ups, worst to best; below 1 ficco is slower. *Tie*: the difference is within the larger "
    "interquartile range of the two. Models are compared with PyTorch's tensor parallelism and "
    "NCCL in the same mode; *best against best* compares the fastest of eager, CUDA graph and "
    "`torch.compile` of both sides. Calls with `auto` are compared with NCCL and `torch.mm`, and "
    "in *best against best* with the fastest call by hand, in a CUDA graph. *Tuned*: a tuning "
    "table that ships with ficco was measured on shapes of these steps. Mixtures of experts are "
    "compared with the fastest of NCCL's all-to-all, its all-gather, and PyTorch's symmetric "
    "memory (forward); their figures have no ties."
)


def first_table(page: Page) -> str:
    """Return the table of programs and gains, and what its words mean."""
    rows = []
    [models] = models_of(page)
    for mode, (words, remedy) in PROGRAMS.items():
        pairs = ("graph over graph", "eager over eager", "best over best")
        cells = [gains.range_text(gains.step_gains(models, mode, pair)) for pair in pairs]
        if cells[:2].count("-"):
            cells[2] = "-"  # a variant of one kind alone is no best
        tuned = ", tuned" if gains.is_tuned(models, mode) else ""
        rows.append([
            f"{words}: Llama 3 {gains.step_sizes(models, mode)}", *cells, remedy,
            f"{_place(models)}{tuned}",
        ])  # fmt: skip
    for _, document in page.newest("dlrm")[:1]:
        kinds = (("captured",), ("eager",), ("captured", "eager"))
        cells = [gains.range_text(gains.table_gains(document, kind)) for kind in kinds]
        rows.append([
            f"train with sharded embedding tables: {len(document['cases'])} sizes of DLRM", *cells,
            "[DLRM](docs/tutorials/dlrm.md)", _place(document),
        ])  # fmt: skip
    for _, document in page.newest("moe")[:1]:
        layers = len({point["shape"] for point in document["points"]})
        for words, kind in (("run", "forward"), ("train", "training")):
            regimes = REGIMES if kind == "forward" else REGIMES[1:]
            cells = [experts.range_of(document, kind, [each]) for each in REGIMES]
            best = "-" if "-" in cells else experts.range_of(document, kind, regimes)
            rows.append([
                f"{words} mixtures of experts: {layers} layers, 1024 and 4096 tokens a GPU, "
                "uniform routing",
                *cells, best, "`ficco.moe`: [tutorial](docs/tutorials/mixture_of_experts.md)",
                _place(document),
            ])  # fmt: skip
    document = page.newest("regret")[0][1]
    cases = document["cases"]
    rows.append([
        f"single calls with `auto`: {len(cases)} random shapes, in no tuning table",
        *(gains.shapes_text(cases, regime, auto.NCCL) for regime in REGIMES),
        gains.shapes_text(cases, "captured", auto.BEST), "measure with `ficco.tune()`",
        _place(document),
    ])  # fmt: skip
    head = ["your program", "in a CUDA graph", "eager", "best against best", "what to do",
            "measured"]  # fmt: skip
    serial = [auto.left_to_serial(document, regime) for regime in REGIMES]
    lost, compared = lost_steps(models, "compiled over compiled")
    compiled = [
        gain
        for mode in PROGRAMS
        for gain in gains.step_gains(models, mode, "compiled over compiled")
    ]  # fmt: skip
    more = (
        f"`auto` leaves {serial[0]} of the {len(cases)} random shapes to `serial` (NCCL, then a "
        f"GEMM) in CUDA graphs, {serial[1]} in eager mode, and gains nothing there. With "
        f"`torch.compile` on both sides ficco is slower in {lost} of {compared} steps "
        f"({gains.range_text(compiled)}): use CUDA graphs instead."
    )
    return "\n".join(wrapped([*table(head, rows), "", NOTES, "", more]))


def machines_measured(page: Page) -> str:
    """Return the GPUs of all results of several ranks: "2 and 4 NVIDIA H100s and H200s"."""
    found = {
        tuple(where(document).split(" NVIDIA "))
        for _, document in read(sorted(page.results.glob("*.json")))
        if document.get("gpus") and document.get("world", 0) > 1 and not document.get("shared_gpus")
    }
    counts = {gpu: sorted(int(count) for count, of in found if of == gpu) for _, gpu in found}
    by_counts: dict[str, list[str]] = {}
    for gpu, numbers in sorted(counts.items()):
        by_counts.setdefault(" and ".join(map(str, numbers)), []).append(gpu)
    return "; ".join(
        f"{numbers} NVIDIA {' and '.join(gpus)}" for numbers, gpus in by_counts.items()
    )


def results(page: Page) -> str:
    """Return the section with the figure and the losses."""
    path, document = page.newest("regret")[0]
    outside = [
        sum(map(len, losses.lost(document, regime).values())) for regime in REGIMES
    ]  # fmt: skip
    lines = [
        "## Performance", "",
        page.picture(
            f"Speed-up of auto over NCCL and torch.mm of every shape, {where(document)}",
            chart.file_of(path).name,
        ), "",
        f"`auto` is clearly slower than the best call by hand on {outside[0]} of "
        f"{len(document['cases'])} random shapes in CUDA graphs, and on {outside[1]} in eager "
        "mode:", "", *losses.cause_table(document, REGIMES), "",
        "*Clearly*: by more than 3%, 2 us (eager: 5 us), and the larger interquartile "
        f"range. {_machine(document)}, {document['date']}; {_versions(document)}. "
        f"[Performance]({SUMMARY}) has all tables, the method, and every shape that is slower.",
    ]  # fmt: skip
    return "\n".join(wrapped(lines))


def recorded(page: Page) -> str:
    """Return what `ficco.explain` printed of a model on GPUs, for the quickstart."""
    [models] = models_of(page)
    cell = next(cell for cell in models["cells"] if cell["mode"] == "training")
    blocks = cell["layers"]
    about = (
        f"On {where(models)} that line printed this, on {models['date']}, for the training step of "
        f"{blocks} blocks of Llama 3 {cell['model']} with {cell['tokens']} tokens. Later releases "
        "word it differently:"
    )
    text = "\n".join(
        textwrap.fill(line, WIDTH, subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2))
        for line in cell["explained"].splitlines()
    )
    return "\n".join(wrapped([about])) + f"\n\n```text\n{text}\n```"


def models_of(page: Page) -> list[Document]:
    return [
        document for _, document in results_of(page.results) if machine_name(document) == MODELS
    ]  # fmt: skip


def _place(document: Document) -> str:
    return f"{where(document).replace('NVIDIA ', '')}, {document['date']}"


def _machine(document: Document) -> str:
    gpu = document["gpus"][0]
    return f"{document['world']} {gpu['name']} (driver {gpu['driver_version']})"


def _versions(document: Document) -> str:
    versions = document["versions"]
    return f"PyTorch {versions['torch']}, NCCL {versions['nvidia-nccl-cu13']}"
