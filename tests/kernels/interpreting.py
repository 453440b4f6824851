"""What Triton 3.6's interpreter needs, to run the kernels, and to run them in less time."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def make_ready() -> None:
    """Let the interpreter run the kernels, once it is imported and before the first launch."""
    _let_loops_count()
    _patch_once_a_launch()
    _check_no_overflow_in_vain()
    _keep_dtypes()


def _let_loops_count() -> None:
    """Let loops run to numbers of the device: NumPy 2.4 makes no int of an array of one element.

    Triton 3.6's interpreter holds scalars in such arrays, and asks NumPy for that.
    """
    patch = interpreter._patch_lang_tensor

    def patch_more(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_more


def _patch_once_a_launch() -> None:
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
