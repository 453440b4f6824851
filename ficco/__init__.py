"""ficco hides tensor-parallel communication behind the GEMMs that need it.

Importing it loads nothing heavy; names below are fetched when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ficco.errors import (
    EngineError,
    FiccoError,
    InputError,
    MachineError,
    PlanError,
    ScheduleError,
    TimeoutExceeded,
)
from ficco.lazy_modules import loaded

if TYPE_CHECKING:
    from ficco.device.windows import window
    from ficco.machine import Machine
    from ficco.modules.explaining import explain
    from ficco.modules.functions import (
        all_gather_matmul,
        all_to_all_matmul,
        column_matmul,
        embedding_all_to_all,
        matmul_all_reduce,
        matmul_all_to_all,
        matmul_reduce_scatter,
    )
    from ficco.modules.groups import (
        close,
        fallback_reason,
        prepare,
        reset,
        synchronize,
        window_bytes,
    )
    from ficco.modules.overlapping import overlap, restore
    from ficco.modules.sizing import size_windows
    from ficco.modules.table_optimizers import FusedRowWiseAdagrad, FusedSGD
    from ficco.modules.tuning import tune
    from ficco.node import Node
    from ficco.plan import Plan
    from ficco.planning import Verification, load_plan, lower, save_plan, verify
    from ficco.problem import Output, Problem
    from ficco.schedule import Schedule
    from ficco.timeline import Span, Timeline
    from ficco.verifier import Violation

__version__ = "0.1.0"

_HOMES = {
    "FusedRowWiseAdagrad": "modules.table_optimizers",
    "FusedSGD": "modules.table_optimizers",
    "Machine": "machine",
    "Node": "node",
    "Output": "problem",
    "Plan": "plan",
    "Problem": "problem",
    "Schedule": "schedule",
    "Span": "timeline",
    "Timeline": "timeline",
    "Verification": "planning",
    "Violation": "verifier",
    "all_gather_matmul": "modules.functions",
    "all_to_all_matmul": "modules.functions",
    "close": "modules.groups",
    "column_matmul": "modules.functions",
    "embedding_all_to_all": "modules.functions",
    "explain": "modules.explaining",
    "fallback_reason": "modules.groups",
    "load_plan": "planning",
    "lower": "planning",
    "matmul_all_reduce": "modules.functions",
    "matmul_all_to_all": "modules.functions",
    "matmul_reduce_scatter": "modules.functions",
    "overlap": "modules.overlapping",
    "prepare": "modules.groups",
    "reset": "modules.groups",
    "restore": "modules.overlapping",
    "save_plan": "planning",
    "size_windows": "modules.sizing",
    "synchronize": "modules.groups",
    "tune": "modules.tuning",
    "verify": "planning",
    "window": "device.windows",
    "window_bytes": "modules.groups",
}

__all__ = [
    "EngineError",
    "FiccoError",
    "FusedRowWiseAdagrad",
    "FusedSGD",
    "InputError",
    "Machine",
    "MachineError",
    "Node",
    "Output",
    "Plan",
    "PlanError",
    "Problem",
    "Schedule",
    "ScheduleError",
    "Span",
    "Timeline",
    "TimeoutExceeded",
    "Verification",
    "Violation",
    "__version__",
    "all_gather_matmul",
    "all_to_all_matmul",
    "close",
    "column_matmul",
    "embedding_all_to_all",
    "explain",
    "fallback_reason",
    "load_plan",
    "lower",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "overlap",
    "prepare",
    "reset",
    "restore",
    "save_plan",
    "size_windows",
    "synchronize",
    "tune",
    "verify",
    "window",
    "window_bytes",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        found = getattr(loaded(_HOMES[name]), name)
        globals()[name] = found  # looked up once: it would cost every call microseconds
        return found
    if name == "_native":
        return _native_core()
    raise AttributeError(f"module 'ficco' has no attribute {name!r}")


def _native_core() -> Any:
    """Import the native core, for `from ficco import _native`.

    Raises:
        EngineError: it is missing, as in a folder of sources, or cannot be loaded.
    """
    try:
        return import_module("ficco._native")
    except ModuleNotFoundError:
        raise EngineError(
            f"{__path__[0]} is a folder of sources without the native core, ficco._native; change "
            "to another folder, where Python finds the installed ficco, or run `pip install -e .` "
            "in the checkout"
        ) from None
    except ImportError as reason:
        raise EngineError(
            f"the native core cannot be loaded ({reason}); install ficco again, with a C++20 "
            "compiler"
        ) from reason


def __dir__() -> list[str]:
    return sorted(__all__)
