"""What Triton's interpreter needs, to run the kernels, and to run them in less time.

From Triton 3.6 on it patches `triton.language` for a launch, and then takes that back by a scope.
Triton 3.5 has no scope, and leaves the language patched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
from triton.language import core
from triton.runtime import interpreter

from ficco.core.private.triton_interpreter import let_comparisons_mask, let_loops_count

HAS_SCOPE = hasattr(interpreter, "_LangPatchScope")


def run_named(subjects: Mapping[str, Callable[[], None]]) -> None:
    """Run the subjects that the command line names, and say "right": the end of a worker."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    make_ready()
    for subject in sys.argv[1:]:
        subjects[subject]()
    print("right")


def make_ready() -> None:
    """Let the interpreter run the kernels, once it is imported and before the first launch."""
    let_comparisons_mask()
    let_loops_count()
    _count_strides_in_bytes()
    _patch_once_a_launch()
    _check_no_overflow_in_vain()
    _keep_dtypes()
    if triton.__version__.startswith("3.6."):
        _make_types_once()
        _make_shapes_once()
        _make_types_of_tuples_when_needed()


def _count_strides_in_bytes() -> None:
    """Let a descriptor's strides be of 16 bytes: Triton 3.5's interpreter wants 16 elements."""
    if HAS_SCOPE:
        return

    def validate(self: Any) -> None:
        item = self.base.dtype.element_ty.primitive_bitwidth // 8
        assert self.base.data.item() % 16 == 0
        assert all(stride.data.item() * item % 16 == 0 for stride in self.strides[:-1])
        assert self.strides[-1].data.item() == 1

    interpreter.TensorDescHandle.validate = validate


def _patch_once_a_launch() -> None:
    """Let functions that a kernel calls find `triton.language` as the launch has patched it.

    The interpreter looks through the language at every such call for what it has patched already,
    which takes a third of the time.
    """
    patch, patched = interpreter._patch_lang, set[int]()

    def patch_anew(function: Any) -> Any:
        names = id(function.__globals__)
        if names in patched:
            return interpreter._LangPatchScope() if HAS_SCOPE else None
        patched.add(names)
        scope = patch(function)
        if scope is None:
            return None
        restore = scope.restore

        def end() -> None:  # called for a launch alone
            patched.clear()
            restore()

        scope.restore = end
        return scope

    interpreter._patch_lang = patch_anew


def _check_no_overflow_in_vain() -> None:
    """Let sums of indices be made once: a check that they fit is dropped unless in debug mode.

    The interpreter makes each once more in 64 bits, and compares, before it finds that out, which
    takes a third of the time.
    """
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def _keep_dtypes() -> None:
    """Let NumPy's dtype be found by one look: the interpreter makes its table at every one."""
    find, found = interpreter._get_np_dtype, dict[str, Any]()

    def find_once(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in found:
            found[name] = find(kind.scalar)
        return found[name]

    interpreter._get_np_dtype = find_once


def _make_types_once() -> None:
    """Let types of blocks be made once: the interpreter makes equal ones in every operation."""
    make, made = core.block_type.__init__, dict[Any, dict[str, Any]]()

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        key = type(element_ty), element_ty.name, sizes
        if key not in made:
            make(self, element_ty, shape)
            made[key] = self.__dict__
        self.__dict__ = made[key]

    core.block_type.__init__ = init


def _make_shapes_once() -> None:
    """Let tensors of one type share their shape, which nothing changes."""
    make = core.tensor.__init__

    def init(self: Any, handle: Any, type: Any) -> None:
        shape = type.__dict__.get("_shape_of_tensors")
        if shape is None:
            make(self, handle, type)
            type.__dict__["_shape_of_tensors"] = self.numel, self.shape
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shape

    core.tensor.__init__ = init


def _make_types_of_tuples_when_needed() -> None:
    """Let a tuple's type, for which few ask, be made when it is asked for."""

    def init(self: Any, args: Any, type: Any = None) -> None:
        self.values, self.given = list(args), type

    def type_of(self: Any) -> Any:
        if not isinstance(self.given, core.tuple_type):
            none = self.given is None
            made = core._type_for_tuple_values(self.values) if none else core.tuple_type(self.given)
            self.given = made
        return self.given

    def set_type(self: Any, type: Any) -> None:
        self.given = type

    core.tuple.__init__, core.tuple.type = init, property(type_of, set_type)
