"""The sources of the compiled kernels, and a digest of them. No Triton.

The digest covers what the compiler reads: the code of all modules with device code, without
comments and docstrings, and the numbers that it takes from elsewhere in ficco.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from pathlib import Path

from ficco.kernels.one_kernel_all_reduce_table import VACANT
from ficco.kernels.one_kernel_gather_table import GATES
from ficco.plan import SIGNALS, Signal, signal_place
from ficco.problem import MAX_WORLD

__all__ = ["MODULES", "digest"]

MODULES = (
    "acquiring", "declarations", "direct_gather_kernel", "direct_handshake", "direct_kernel",
    "direct_product", "gated_kernel", "landed_sum", "leaving_kernel", "mailing", "many_words",
    "pool_kernel", "pushing_kernel", "releasing", "sharing", "sum_kernel", "summing_kernel",
    "tile_product",
)  # fmt: skip


@functools.cache
def digest() -> str:
    """Return a digest of the kernels' sources."""
    found = hashlib.sha256()
    for name in MODULES:
        text = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        found.update(f"{name}\n{_code_of(text)}\n".encode())
    places = [signal_place(Signal(0, kind, 0)) for kind in ("entered", "free")]
    found.update(repr((sorted(SIGNALS.items()), places, MAX_WORLD, GATES, VACANT)).encode())
    return found.hexdigest()


def _code_of(text: str) -> str:
    """Return a module's code without comments, docstrings and positions."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) or not body:
            continue
        first = body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            del body[0]
    return ast.unparse(tree)
