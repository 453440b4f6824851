"""vLLM itself, for what `vllm_double.py` stands in: the modules of an installed wheel on a CPU.

Packages that the wheel needs and that are missing are stubs: they are imported, never called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from contextlib import AbstractContextManager
from typing import Any, ClassVar

STUBS = ("llguidance", "partial_json_parser", "xgrammar")


class _Stub(types.ModuleType):
    """A module whose every name is an empty class."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] not in STUBS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return _Stub(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def install() -> None:
    """Make vLLM importable."""
    sys.meta_path.append(_Finder())
    import vllm  # noqa: F401


def configured() -> Any:
    """Return a server's VllmConfig."""
    from vllm.config import DeviceConfig, VllmConfig

    return VllmConfig(device_config=DeviceConfig("cpu"))


def running(config: Any) -> AbstractContextManager[None]:
    """Layers are made and run inside."""
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(config)  # type: ignore[no-any-return]


def connect(store: str, rank: int, world: int) -> None:
    """Initialize torch.distributed, before vLLM's groups are made."""
    from vllm.distributed.parallel_state import init_distributed_environment

    init_distributed_environment(world, rank, f"file://{store}", rank, "gloo")
