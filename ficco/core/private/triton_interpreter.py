"""Private names of Triton's interpreter, and corrections without which kernels fail in it.

The interpreter of Triton 3.5 and 3.6 holds a scalar in an array of one element, and makes a loop's
bound of it by `int`, which NumPy 2.4 refuses. That of Triton 3.9 refuses a mask in which a
comparison of scalars is combined with a block, because it gives a comparison the type of its
operands. The fallbacks change nothing: such kernels then fail with the interpreter's own error.
Only interpreted kernels need this module.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from ficco.core.private.finding import find

_MODULE = "triton.runtime.interpreter"

patch_tensor = find(f"{_MODULE}:_patch_lang_tensor", None, "loops fail under NumPy 2.4")
"""Gives Triton's tensors what Python needs of them, for one launch. None: absent.

There is no public function.
"""

binary_op = find(
    f"{_MODULE}:InterpreterBuilder.binary_op", None, "masks with comparisons of scalars may fail"
)
"""Computes a binary operation or a comparison. None: absent. There is no public function."""


def let_comparisons_mask() -> None:
    """Let comparisons in interpreted kernels have the type int1, as in compiled ones."""
    if binary_op is None:
        return
    truth = importlib.import_module("triton.language").int1

    def binary_op_of_truths(builder: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        made = binary_op(builder, lhs, rhs, op)
        if made.data.dtype == bool:
            made.dtype = truth
        return made

    interpreter: Any = importlib.import_module(_MODULE)
    interpreter.InterpreterBuilder.binary_op = binary_op_of_truths


def let_loops_count() -> None:
    """Let loops of interpreted kernels run to numbers that the kernel computes or gets."""
    if patch_tensor is None:
        return

    def patch_more(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        assign = scope[0].set_attr if scope else setattr
        assign(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter: Any = importlib.import_module(_MODULE)
    interpreter._patch_lang_tensor = patch_more


def numbers_in(value: Any) -> npt.NDArray[Any]:
    """Return the numbers, or the addresses, of a tensor or a constant of an interpreted kernel."""
    handle = getattr(value, "handle", None)
    return np.asarray(getattr(value, "value", value) if handle is None else handle.data)
