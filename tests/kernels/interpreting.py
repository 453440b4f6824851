"""What Triton 3.6's interpreter needs, to run the kernels, and to run them in less time."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def let_loops_count() -> None:
    """Let loops run to numbers of the device: NumPy 2.4 makes no int of an array of one element.

    Triton 3.6's interpreter holds scalars in such arrays, and asks NumPy for that.
    """
    patch = interpreter._patch_lang_tensor

    def patch_more(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_more


def patch_once_a_launch() -> None:
    """Let functions that a kernel calls find `triton.language` as the launch has patched it.

    The interpreter looks through the language at every such call for what it has patched already,
    which takes a third of the time.
    """
    patch, patched = interpreter._patch_lang, set[int]()

    def patch_anew(function: Any) -> Any:
        names = id(function.__globals__)
        if names in patched:
            return interpreter._LangPatchScope()
        patched.add(names)
        scope = patch(function)
        restore = scope.restore

        def end() -> None:  # called for a launch alone
            patched.clear()
            restore()

        scope.restore = end
        return scope

    interpreter._patch_lang = patch_anew
