"""A private name of Triton's interpreter: what lets a kernel's loops run under NumPy 2.4.

The interpreter of Triton 3.5 and 3.6 holds a scalar in an array of one element, and makes a loop's
bound of it by `int`, which NumPy 2.4 refuses. The fallback changes nothing: such loops then fail
under NumPy 2.4, with the interpreter's own error. Only interpreted kernels need this module.
"""

from __future__ import annotations

import importlib
from typing import Any

from ficco.private.finding import find

__all__ = ["let_loops_count", "patch_tensor"]

_MODULE = "triton.runtime.interpreter"

patch_tensor = find(f"{_MODULE}:_patch_lang_tensor", None, "loops fail under NumPy 2.4")
"""Gives Triton's tensors what Python needs of them, for one launch. None: absent.

There is no public function.
"""


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
