"""Names of Triton without documentation: compiling before a launch, and reading the result.

Importing this module imports Triton. Kernels of the pack need neither. The public fallback is
Triton's own launch, `function[grid](...)`, which compiles by itself: `why_not_ahead` and
`facts_of` say why a kernel has to be launched so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ficco.errors import EngineError
from ficco.private.finding import find

__all__ = ["Facts", "assemblies_of", "compile_ahead", "facts_of", "load", "why_not_ahead"]

_LAUNCHED = "kernels that the pack lacks are launched by Triton, which takes longer"

compile_source = find("triton:compile", None, _LAUNCHED)
"""Compiles a source for a target. None: it is absent.

The public `triton.jit` compiles at a launch, for the GPU of the launch.
"""

AheadSource = find("triton.compiler:ASTSource", None, _LAUNCHED)
"""A function with types of its parameters, constants, and what divides the others.

None: it is absent. The public launch derives them from the arguments.
"""

Target = find("triton.backends.compiler:GPUTarget", None, _LAUNCHED)
"""A backend, a compute capability and a width of warps. None: it is absent.

The public launch compiles for the current device.
"""


class Facts(NamedTuple):
    """What Triton says of a compiled kernel, by the names of its `metadata`.

    Without one of these names, native code cannot launch the kernel, and Triton's launch serves.

    Attributes:
        name: of the entry.
        triton_version: of the compiler.
        target: with `backend`.
        shared: bytes of dynamic shared memory.
        num_warps: of a block.
        num_ctas: blocks of a cluster.
        launch_cooperative_grid: whether all blocks have to run at the same time.
        launch_pdl: whether Triton launches it before the launch ahead of it ends.
        global_scratch_size, profile_scratch_size: bytes.
        tensordesc_meta: a dictionary for each descriptor.
    """

    name: str
    triton_version: str
    target: Any
    shared: int
    num_warps: int
    num_ctas: int
    launch_cooperative_grid: bool
    launch_pdl: bool
    global_scratch_size: int | None
    profile_scratch_size: int | None
    tensordesc_meta: list[dict[str, Any]] | None


def why_not_ahead() -> str:
    """Say why nothing can be compiled before its launch; "": it can."""
    names = {"triton.compile": compile_source, "ASTSource": AheadSource, "GPUTarget": Target}
    lacks = [name for name, found in names.items() if found is None]
    return f"the installed Triton has no {lacks[0]}" if lacks else ""


def compile_ahead(
    function: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    attributes: Mapping[tuple[int, ...], Any],
    capability: int,
    options: Mapping[str, int],
) -> Any:
    """Return what Triton compiles of a function for a GPU of NVIDIA, or finds in its cache.

    Ask `why_not_ahead` before.
    """
    source = AheadSource(function, dict(signature), dict(constants), dict(attributes))
    return compile_source(source, target=Target("cuda", capability, 32), options=dict(options))


def facts_of(made: Any) -> Facts:
    """Return what is known of a compiled kernel.

    Raises:
        EngineError: Triton does not say one of these.
    """
    said = getattr(made, "metadata", None)
    for name in Facts._fields:
        if not hasattr(said, name):
            raise EngineError(f"the installed Triton does not say {name} of a kernel")
    return Facts(*[getattr(said, name) for name in Facts._fields])


def assemblies_of(made: Any) -> tuple[bytes, str]:
    """Return the cubin and the PTX text of a compiled kernel.

    Raises:
        EngineError: Triton does not hand them out.
    """
    kept: Any = getattr(made, "asm", {})
    if "cubin" not in kept or "ptx" not in kept:
        raise EngineError("the installed Triton does not hand out a kernel's cubin and PTX")
    return kept["cubin"], kept["ptx"]


def load(
    function: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], options: Mapping[str, int]
) -> None:
    """Compile and load what `function[grid](**arguments, **options)` launches, but launch nothing.

    The fallback does nothing: the kernel is then compiled and loaded at its first launch.
    """
    prepare: Callable[..., Any] | None = getattr(function, "warmup", None)
    if prepare is not None:
        made = prepare(**arguments, **options, grid=grid)
        _ = getattr(made, "run", None)  # Triton loads when it is asked for its launcher
