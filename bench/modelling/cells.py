"""The cells of model.py, the most important first. It does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

TORCH, TORCH_GRAPH = "torch", "torch_graph"
TORCH_COMPILED, TORCH_ASYNC = "torch_compiled", "torch_async"
FICCO, FICCO_GRAPH, FICCO_COMPILED = "ficco", "ficco_graph", "ficco_compiled"
VARIANTS = {
    TORCH: "PyTorch's TP (+ SP) with NCCL, eager; what all others are held against",
    TORCH_GRAPH: "the same as a CUDA graph",
    TORCH_COMPILED: "the same, each block by torch.compile",
    TORCH_ASYNC: "the same with torch._inductor.config._micro_pipeline_tp: PyTorch's async TP",
    FICCO: "ficco.overlap(), eager",
    FICCO_GRAPH: "the same as a CUDA graph",
    FICCO_COMPILED: "ficco.overlap(), each block by torch.compile",
}
COMPILED = (TORCH_COMPILED, TORCH_ASYNC, FICCO_COMPILED)
PARTS = {
    "eager": 0.45,
    "compiled": 0.97,
    "more": 1.0,
}  # fraction of the time at which each ends

_UNCOMPILED = (TORCH, FICCO, FICCO_GRAPH, TORCH_GRAPH)
_SPLIT = (TORCH, FICCO, TORCH_COMPILED, TORCH_ASYNC, FICCO_COMPILED)
_WHOLE = (TORCH, FICCO, TORCH_COMPILED, FICCO_COMPILED)


@dataclass(frozen=True)
class Cell:
    """One kind of step of one model, with several variants.

    Attributes:
        mode: "training", "prefill", "prefill_tp" (whole activations on every rank, sums by
            all-reduce, as in Hugging Face's plans), "decode" or "serving" (prefill, with another m
            in every step).
        model: a key of SIZES.
        tokens: tokens of a step, over all ranks; for serving, the most tokens of a step.
        variants: in the order of preparation.
        part: a key of PARTS.
    """

    mode: str
    model: str
    tokens: int
    variants: tuple[str, ...]
    part: str

    @property
    def id(self) -> str:
        """The cell's name."""
        return f"{self.mode} {self.model} {self.tokens} {self.part}"

    @property
    def split(self) -> bool:
        """Whether activations are split along the sequence dimension."""
        return self.mode not in ("decode", "prefill_tp")


def cells(part: str, tiny: bool) -> list[Cell]:
    """Return a part's cells, in the order of measurement."""
    if tiny:
        return _tiny(part)
    if part == "eager":
        asked = [("training", "70B", 8192), ("training", "70B", 4096), ("training", "8B", 8192),
                 ("prefill", "70B", 8192), ("decode", "70B", 1), ("decode", "70B", 16),
                 ("prefill", "8B", 8192), ("serving", "70B", 8192), ("prefill_tp", "70B", 8192),
                 ("prefill", "70B", 4096), ("prefill_tp", "8B", 8192),
                 ("decode", "70B", 4), ("decode", "70B", 64), ("prefill", "70B", 16384),
                 ("training", "8B", 4096), ("decode", "8B", 1), ("decode", "8B", 16)]  # fmt: skip
        # No graphs in the first cell: if a capture hangs, the most important figures are done.
        plain = [mode == "serving" or i == 0 for i, (mode, _, _) in enumerate(asked)]
        return [
            Cell(*each, (TORCH, FICCO) if alone else _UNCOMPILED, part)
            for each, alone in zip(asked, plain, strict=True)
        ]
    if part == "compiled":
        asked = [("training", "70B", 8192), ("prefill", "70B", 8192), ("training", "8B", 8192),
                 ("decode", "70B", 1), ("prefill", "8B", 8192),
                 ("decode", "70B", 16)]  # fmt: skip
        graphs = (FICCO_GRAPH, TORCH_GRAPH)
        return [
            Cell(*each, _WHOLE if each[0] == "decode" else _SPLIT + graphs * (i == 0), part)
            for i, each in enumerate(asked)
        ]
    asked = [("training", "70B", 16384), ("training", "8B", 16384), ("prefill", "8B", 4096),
             ("prefill", "8B", 16384), ("serving", "8B", 8192), ("decode", "8B", 4),
             ("decode", "8B", 64)]  # fmt: skip
    return [
        Cell(mode, model, tokens, (TORCH, FICCO) if mode == "serving" else _UNCOMPILED, part)
        for mode, model, tokens in asked
    ]


def _tiny(part: str) -> list[Cell]:
    if part == "eager":
        asked = [("training", 32), ("prefill", 32), ("prefill_tp", 32), ("decode", 3),
                 ("serving", 32)]  # fmt: skip
        return [Cell(mode, "tiny", tokens, (TORCH, FICCO), part) for mode, tokens in asked]
    if part == "compiled":
        return [
            Cell("training", "tiny", 32, _SPLIT, part),
            Cell("decode", "tiny", 3, _WHOLE, part),
        ]
    return []
