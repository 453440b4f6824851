"""ficco hides tensor-parallel communication behind the GEMMs that need it.

Importing it loads nothing heavy; names below are fetched when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ficco.core.errors import (
    EngineError,
    FiccoError,
    InputError,
    MachineError,
    PlanError,
    ScheduleError,
    TimeoutExceeded,
)
from ficco.core.lazy_modules import loaded

if TYPE_CHECKING:
    from ficco.api.experts import dispatch_matmul, matmul_combine
    from ficco.api.explaining import explain
    from ficco.api.functions import (
        all_gather_matmul,
        all_to_all_matmul,
        column_matmul,
        embedding_all_to_all,
        matmul_all_reduce,
        matmul_all_to_all,
        matmul_reduce_scatter,
    )
    from ficco.api.groups import (
        close,
        fallback_reason,
        prepare,
        reset,
        synchronize,
        window_bytes,
    )
    from ficco.api.moe import moe
    from ficco.api.node import Node
    from ficco.api.overlapping import overlap, restore
    from ficco.api.routing import Routing, route
    from ficco.api.sizing import limit_windows, reserve
    from ficco.api.table_optimizers import FusedRowWiseAdagrad, FusedSGD
    from ficco.api.tuning import tune
    from ficco.core.machine import Machine
    from ficco.device.windows import window
    from ficco.lowering.planning import Verification, load_plan, lower, save_plan, verify
    from ficco.operators.problem import Problem
    from ficco.operators.problem_checks import Output
    from ficco.plan import Plan
    from ficco.plan.schedule import Schedule
    from ficco.plan.timeline import Span, Timeline
    from ficco.verifier import Violation

__version__ = "0.1.0"

_HOMES = {
    "FusedRowWiseAdagrad": "api.table_optimizers",
    "FusedSGD": "api.table_optimizers",
    "Machine": "core.machine",
    "Node": "api.node",
    "Output": "operators.problem_checks",
    "Plan": "plan",
    "Problem": "operators.problem",
    "Routing": "api.routing",
    "Schedule": "plan.schedule",
    "Span": "plan.timeline",
    "Timeline": "plan.timeline",
    "Verification": "lowering.planning",
    "Violation": "verifier",
    "all_gather_matmul": "api.functions",
    "all_to_all_matmul": "api.functions",
    "close": "api.groups",
    "column_matmul": "api.functions",
    "dispatch_matmul": "api.experts",
    "embedding_all_to_all": "api.functions",
    "explain": "api.explaining",
    "fallback_reason": "api.groups",
    "limit_windows": "api.sizing",
    "load_plan": "lowering.planning",
    "lower": "lowering.planning",
    "matmul_all_reduce": "api.functions",
    "matmul_all_to_all": "api.functions",
    "matmul_combine": "api.experts",
    "matmul_reduce_scatter": "api.functions",
    "moe": "api.moe",
    "overlap": "api.overlapping",
    "prepare": "api.groups",
    "reserve": "api.sizing",
    "reset": "api.groups",
    "restore": "api.overlapping",
    "route": "api.routing",
    "save_plan": "lowering.planning",
    "synchronize": "api.groups",
    "tune": "api.tuning",
    "verify": "lowering.planning",
    "window": "device.windows",
    "window_bytes": "api.groups",
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
    "Routing",
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
    "dispatch_matmul",
    "embedding_all_to_all",
    "explain",
    "fallback_reason",
    "limit_windows",
    "load_plan",
    "lower",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_combine",
    "matmul_reduce_scatter",
    "moe",
    "overlap",
    "prepare",
    "reserve",
    "reset",
    "restore",
    "route",
    "save_plan",
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
            f"the native core cannot be loaded ({reason}); if it was built for another system, "
            "install ficco again, with a C++20 compiler"
        ) from reason


def __dir__() -> list[str]:
    return sorted(__all__)
