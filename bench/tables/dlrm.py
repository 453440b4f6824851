"""The tables of dlrm_MACHINE.json."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tables.sources import Document, table

__all__ = ["gains", "reasons", "times"]

MODES = ("captured", "eager")
PARTS = {"training": "training", "embeddings": "tables alone", "inference": "inference"}
NAMES = {
    "torch_dense": "PyTorch, dense", "torch_sparse": "PyTorch, sparse", "ficco_dense": "dense",
    "ficco_sparse": "sparse", "ficco_fused": "`FusedSGD`", "ficco_adagrad": "`FusedRowWiseAdagrad`",
}  # fmt: skip


def gains(document: Document) -> list[str]:
    """Return the speed-ups of ficco's fastest way over PyTorch's, and the share of the tables."""
    keys = [f"{part}, {mode}" for part in PARTS for mode in MODES]
    rows = []
    for case in document["cases"]:
        share = case["embedding_share"].get("captured", case["embedding_share"].get("eager"))
        figures = [case["torch_over_ficco"].get(key) for key in keys]
        rows.append([
            _model(case), "-" if share is None else f"{share:.0%}",
            *("-" if figure is None else f"{figure:.2f}x" for figure in figures),
        ])  # fmt: skip
    heads = [f"{words}, {mode}" for words in PARTS.values() for mode in MODES]
    return table(["model", "share of tables", *heads], rows)


def times(document: Document) -> list[str]:
    """Return ms of a training step of each way, the fastest in bold."""
    rows: list[list[str]] = []
    for case in document["cases"]:
        for mode in MODES:
            found = case["ms"].get(f"training, {mode}")
            if found:
                rows.append([_model(case), mode, *_figures(found)])
    return table(["model", "step", *NAMES.values()], rows)


def _model(case: Document) -> str:
    """Return the sizes of a case in words."""
    return str(case["case"]).replace(" 1 lookups", " 1 lookup")


def _figures(found: dict[str, Any]) -> Iterable[str]:
    medians = {name: found[name]["median"] for name in NAMES if name in found}
    least = min(medians.values())
    for name in NAMES:
        text = f"{medians[name]:.3f}" if name in medians else "-"
        yield f"**{text}**" if medians.get(name) == least else text


def reasons(document: Document) -> list[str]:
    """Return the ways without figures, each with its reason."""
    return [
        f"- {_model(case)}, {what}: {next(iter(said.values()))}"
        for case in document["cases"]
        for what, said in case["refused"].items()
    ]
