"""Undocumented names of Triton: to compile before a launch, and to read the result.

Importing this module imports Triton; kernels of the pack do not need it. The public fallback is
Triton's own launch, `function[grid](...)`, which compiles the kernel. `why_not_ahead` and
`facts_of` say why a kernel needs that launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ficco.core.errors import EngineError
from ficco.core.private.finding import find

_EFFECT = "kernels that the pack lacks are launched by Triton, which takes longer"

compile_source = find("triton:compile", None, _EFFECT)
"""Compiles a source for a target. None: absent.

The public `triton.jit` compiles at a launch, for the GPU of the launch.
"""

AheadSource = find("triton.compiler:ASTSource", None, _EFFECT)
"""A function with its parameters' types, its constants, and divisibility of the other arguments.

None: absent. The public launch derives them from the arguments.
"""

Target = find("triton.backends.compiler:GPUTarget", None, _EFFECT)
"""A backend, a compute capability and a warp size. None: absent.

The public launch compiles for the current device.
"""


class Facts(NamedTuple):
    """Triton's facts about a compiled kernel, by the names in its `metadata`.

    If one of these names is missing, native code cannot launch the kernel, and Triton does.

    Attributes:
        name: of the entry.
        triton_version: version of the compiler.
        target: an object with `backend`.
        shared: bytes of dynamic shared memory.
        num_warps: warps per block.
        num_ctas: blocks per cluster.
        launch_cooperative_grid: whether all blocks must run at the same time.
        launch_pdl: whether Triton launches it before the preceding launch ends.
        global_scratch_size, profile_scratch_size: bytes.
        tensordesc_meta: one dictionary per descriptor.
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
    """Return why kernels cannot be compiled before their launch; "": they can."""
    names = {"triton.compile": compile_source, "ASTSource": AheadSource, "GPUTarget": Target}
    missing = [name for name, value in names.items() if value is None]
    return f"the installed Triton has no {missing[0]}" if missing else ""


def compile_ahead(
    function: Any,
    signature: Mapping[str, Any],
    constants: Mapping[str, Any],
    attributes: Mapping[tuple[int, ...], Any],
    capability: int,
    options: Mapping[str, int],
) -> Any:
    """Compile a function for an NVIDIA GPU, or take the kernel from Triton's cache.

    Check `why_not_ahead` first.
    """
    source = AheadSource(function, dict(signature), dict(constants), dict(attributes))
    return compile_source(source, target=Target("cuda", capability, 32), options=dict(options))


def compile_for_amd(
    function: Any,
    signature: Mapping[str, Any],
    arch: str,
    wavefront: int,
    options: Mapping[str, int],
    constants: Mapping[str, Any] = MappingProxyType({}),
    attributes: Mapping[tuple[int, ...], Any] = MappingProxyType({}),
) -> Any:
    """Compile a function for an AMD GPU; `code_object_of` and `facts_of` read the result.

    Check `why_not_ahead` first.
    """
    source = AheadSource(function, dict(signature), dict(constants), dict(attributes))
    target = Target("hip", arch, wavefront)
    return compile_source(source, target=target, options=dict(options))


def code_object_of(kernel: Any) -> tuple[bytes, str]:
    """Return the code object and the instructions of a kernel that was compiled for an AMD GPU.

    Raises:
        EngineError: Triton does not provide them.
    """
    assemblies: Any = getattr(kernel, "asm", {})
    if "hsaco" not in assemblies or "amdgcn" not in assemblies:
        raise EngineError("the installed Triton does not provide a kernel's code object")
    return assemblies["hsaco"], assemblies["amdgcn"]


def shared_bytes_of(kernel: Any) -> int:
    """Return the dynamic shared memory of a kernel that was compiled for an AMD GPU.

    Raises:
        EngineError: Triton does not tell it.
    """
    metadata: Any = getattr(kernel, "metadata", None)
    if not hasattr(metadata, "shared"):
        raise EngineError("the installed Triton does not have shared in a kernel's metadata")
    return int(metadata.shared)


def facts_of(kernel: Any) -> Facts:
    """Return the facts about a compiled kernel.

    Raises:
        EngineError: Triton's metadata lacks one of them.
    """
    metadata = getattr(kernel, "metadata", None)
    for name in Facts._fields:
        if not hasattr(metadata, name):
            raise EngineError(f"the installed Triton does not have {name} in a kernel's metadata")
    return Facts(*[getattr(metadata, name) for name in Facts._fields])


def assemblies_of(kernel: Any) -> tuple[bytes, str]:
    """Return the cubin and the PTX text of a compiled kernel.

    Raises:
        EngineError: Triton does not provide them.
    """
    assemblies: Any = getattr(kernel, "asm", {})
    if "cubin" not in assemblies or "ptx" not in assemblies:
        raise EngineError("the installed Triton does not provide a kernel's cubin and PTX")
    return assemblies["cubin"], assemblies["ptx"]


def load(
    function: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], options: Mapping[str, int]
) -> None:
    """Compile and load the kernel of `function[grid](**arguments, **options)`, without a launch.

    The fallback does nothing: the kernel is then compiled and loaded at its first launch.
    """
    prepare: Callable[..., Any] | None = getattr(function, "warmup", None)
    if prepare is not None:
        kernel = prepare(**arguments, **options, grid=grid)
        _ = getattr(kernel, "run", None)  # reading the launcher makes Triton load the kernel
