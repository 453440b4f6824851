"""The sources of the compiled kernels, and digests of them. No Triton.

The digest of all covers the compiler's input: the code of all modules with device code, without
comments, docstrings and imports from other modules, and the numbers that the code imports from
elsewhere in ficco. The digest of one kernel covers what the kernel's function reaches of it. A
digest is the same with every version of Python.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ficco.operators.problem_checks import MAX_WORLD
from ficco.plan import SIGNALS, Signal, signal_place
from ficco.plan.tables import GATES, MOVES, VACANT

MODULES = (
    "declarations", "experts_activation_kernel", "experts_gradient_kernel",
    "experts_product_kernel", "experts_route_kernel", "experts_sum_kernel", "gated_push_kernel",
    "gated_sum_kernel", "gated_wait_kernel", "mailbox", "one_kernel_all_reduce_kernel",
    "one_kernel_gather_kernel", "one_kernel_handshake", "one_kernel_pool_kernel",
    "one_kernel_product", "pooled_block", "pooled_tables_kernel", "pulling_kernel",
    "row_updates_kernel", "sending_kernel", "signal_ptx", "signals", "split_k", "sum_epilogue",
    "sum_kernel", "tile_product", "tuple_arguments", "window_release_kernel",
)  # fmt: skip


@functools.cache
def digest() -> str:
    """Return a digest of the kernels' sources."""
    hashed = hashlib.sha256()
    for name in MODULES:
        hashed.update(f"{name}\n{code_of(_text_of(name))}\n".encode())
    hashed.update(_numbers().encode())
    return hashed.hexdigest()


def digest_of(module: str, function: str) -> str:
    """Return a digest of a kernel: its function, and all that this reaches in `MODULES`.

    Args:
        module: the dotted name of the function's module.
        function: its name.
    """
    return _digest_of({name: _text_of(name) for name in MODULES}, module, function)


def _digest_of(texts: Mapping[str, str], module: str, function: str) -> str:
    defined = {name: _definitions(text) for name, text in texts.items()}
    start = (module.rpartition(".")[2], function)
    reached, left = {start: ""}, [start]
    while left:
        home, name = left.pop()
        found = defined[home][name]
        if isinstance(found, _Import):
            uses = [(found.home, found.name)]
        else:
            reached[home, name] = found.code
            uses = [(home, each) for each in found.names if each in defined[home]]
        for use in uses:
            if use not in reached:
                reached[use] = ""
                left.append(use)
    return hashlib.sha256(f"{sorted(reached.items())}{_numbers()}".encode()).hexdigest()


class _Statement(NamedTuple):
    """A statement that defines a name: its code, and the names in it."""

    code: str
    names: frozenset[str]


class _Import(NamedTuple):
    """A name that another module defines."""

    home: str
    name: str


@functools.lru_cache(maxsize=2 * len(MODULES))
def _definitions(text: str) -> Mapping[str, _Statement | _Import]:
    """Return what each name of a module is."""
    found: dict[str, _Statement | _Import] = {}
    for statement in _code(text).body:
        if isinstance(statement, ast.ImportFrom) and statement.module:
            home = statement.module.rpartition(".")[2]
            names = {each.asname or each.name: each.name for each in statement.names}
            found |= {own: _Import(home, name) for own, name in names.items()}
            continue
        used = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        known = _Statement(_written(statement), frozenset([node.id for node in used]))
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            found[statement.name] = known
        else:
            found |= {node.id: known for node in used if isinstance(node.ctx, ast.Store)}
    return found


def _text_of(module: str) -> str:
    return Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")


def _numbers() -> str:
    """Return the numbers that the code imports from elsewhere in ficco."""
    places = [signal_place(Signal(0, kind, 0)) for kind in ("entered", "free")]
    return repr((sorted(SIGNALS.items()), places, MAX_WORLD, GATES, VACANT, MOVES))


def _is_foreign(statement: ast.stmt) -> bool:
    """Return whether a statement imports from modules without device code."""
    device = {f"ficco.kernels.{name}" for name in MODULES}
    if isinstance(statement, ast.ImportFrom):
        return statement.module not in device
    return isinstance(statement, ast.Import)


def code_of(text: str) -> str:
    """Return a module's code without foreign imports, comments, docstrings and positions."""
    return _written(_code(text))


def _written(value: object) -> str:
    """Return a syntax tree as text: the fields that are set, which all versions of Python have.

    `ast.unparse` quotes f-strings in another way since Python 3.12, and `ast.dump` leaves out other
    fields in each version.
    """
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = [(name, part) for name, part in ast.iter_fields(value) if part not in (None, [])]
    return f"{type(value).__name__}({', '.join(f'{n}={_written(part)}' for n, part in fields)})"


@functools.lru_cache(maxsize=2 * len(MODULES))
def _code(text: str) -> ast.Module:
    """Return the syntax tree of a module's code, see `code_of`."""
    tree = ast.parse(text)
    tree.body = [statement for statement in tree.body if not _is_foreign(statement)]
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) or not body:
            continue
        first = body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            del body[0]
    return tree
