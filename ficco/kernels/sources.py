"""The sources of the compiled kernels, and a digest of them. No Triton.

The digest covers the compiler's input: the code of all modules with device code, without comments,
docstrings and imports from other modules, and the numbers that the code imports from elsewhere in
ficco.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from pathlib import Path

from ficco.plan import SIGNALS, Signal, signal_place
from ficco.problem import MAX_WORLD
from ficco.tables import GATES, MOVES, VACANT

__all__ = ["MODULES", "digest"]

MODULES = (
    "declarations", "gated_push_kernel", "gated_sum_kernel", "gated_wait_kernel", "mailbox",
    "one_kernel_all_reduce_kernel", "one_kernel_gather_kernel", "one_kernel_handshake",
    "one_kernel_pool_kernel", "one_kernel_product", "pooled_block",
    "pooled_tables_kernel", "pulled_all_reduce_kernel", "row_updates_kernel",
    "signal_sets", "signal_wait", "split_k", "sum_epilogue", "sum_kernel", "tile_product",
    "tile_signal", "window_release_kernel",
)  # fmt: skip


@functools.cache
def digest() -> str:
    """Return a digest of the kernels' sources."""
    hashed = hashlib.sha256()
    for name in MODULES:
        text = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        hashed.update(f"{name}\n{_code_of(text)}\n".encode())
    places = [signal_place(Signal(0, kind, 0)) for kind in ("entered", "free")]
    hashed.update(repr((sorted(SIGNALS.items()), places, MAX_WORLD, GATES, VACANT, MOVES)).encode())
    return hashed.hexdigest()


def _is_foreign(statement: ast.stmt) -> bool:
    """Return whether a statement imports from modules without device code."""
    device = {f"ficco.kernels.{name}" for name in MODULES}
    if isinstance(statement, ast.ImportFrom):
        return statement.module not in device
    return isinstance(statement, ast.Import)


def _code_of(text: str) -> str:
    """Return a module's code without foreign imports, comments, docstrings and positions."""
    tree = ast.parse(text)
    tree.body = [statement for statement in tree.body if not _is_foreign(statement)]
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) or not body:
            continue
        first = body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            del body[0]
    return ast.unparse(tree)
