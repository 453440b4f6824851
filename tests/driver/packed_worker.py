"""Kernels of the pack on a GPU of the driver's test double, in a process that has no Triton.

python packed_worker.py SCENARIO ...
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from typing import Any


class _Hidden(MetaPathFinder):
    """Lets nobody find Triton."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.split(".", maxsplit=1)[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, _Hidden())
found_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name.split(".")[0] == "triton" else found_spec(name, package)
)

import double_control as control  # noqa: E402
import torch  # noqa: E402
from double_control import Cuda  # noqa: E402
from engine_node import expected  # noqa: E402
from gated_on_stream import by_name, multiply, parameters_of  # noqa: E402

from ficco import _native  # noqa: E402
from ficco.core.errors import EngineError  # noqa: E402
from ficco.engine.compute.own_kernels import OwnKernels  # noqa: E402
from ficco.engine.wanted import SETTING  # noqa: E402
from ficco.kernels import loading  # noqa: E402
from ficco.kernels.native_launch import Code, Signal, Slot  # noqa: E402
from ficco.kernels.records import LaunchOf  # noqa: E402
from ficco.kernels.variants import Variant  # noqa: E402
from ficco.plan import Region  # noqa: E402
from ficco.plan.tables import GatedPart  # noqa: E402
from ficco.program import Gated, Sum  # noqa: E402

ROWS, DATA = 300, 5
errors: list[BaseException] = []


class OnDouble:
    """Tensors in the memory of the double's device 0, which passes for an H100."""

    device, on_gpu, processors, capability = "double", True, 132, 90

    def __init__(self) -> None:
        self.cuda = Cuda()
        self.stream = int(self.cuda.stream())

    def empty(self, count: int, dtype: str) -> torch.Tensor:
        kind = getattr(torch, dtype)
        size = max(count, 1) * kind.itemsize
        memory = (ctypes.c_uint8 * size).from_address(int(self.cuda.cuMemAlloc(size)))
        return torch.frombuffer(memory, dtype=kind)[:count]

    def place(self, numbers: Any, dtype: str) -> torch.Tensor:
        given = torch.as_tensor(numbers, dtype=getattr(torch, dtype)).flatten()
        return self.empty(given.numel(), dtype).copy_(given)

    def matrix(self, rows: int, cols: int, dtype: str = "bfloat16") -> torch.Tensor:
        return self.empty(rows * cols, dtype).reshape(rows, cols).copy_(torch.randn(rows, cols))

    def current(self) -> tuple[int, int]:
        return 0, self.stream

    def capturing(self) -> bool:
        return False

    def wait(self) -> None:
        self.cuda.cuStreamSynchronize(self.stream)
        assert not errors, errors[0]


WHOLE = Region(0, "whole", 0, 1, 0, 1)  # kernels read no regions


def prepared(
    kernels: OwnKernels, parts: list[GatedPart], n: int, k: int, dtype: str, stop: torch.Tensor
) -> LaunchOf:
    """Return the launches of a gated GEMM."""
    work = Gated(tuple(parts), n, k, dtype, WHOLE, True, *(None, WHOLE, None, None, None, None),
                 begun=False)  # fmt: skip
    return kernels.prepare(work, SETTING._replace(timeout_s=5.0, stop_word=stop.data_ptr))


def stand_in_for(run: dict[str, Any]) -> None:
    """Let host functions stand for what is loaded from now on, by the kernels' names."""
    load = loading._load

    def loaded(device: int, variant: Variant, capability: int) -> Code:
        code = load(device, variant, capability)

        def call(parameters: list[int], shape: tuple[int, ...]) -> None:
            try:
                assert shape[3] == code.threads and shape[4] == code.shared_bytes
                run[variant.kernel](by_name(variant, parameters))
            except BaseException as error:
                errors.append(error)

        assert code.function is not None
        control.stand_in(code.function, parameters_of(variant), call)
        return code

    loading._load = loaded


def added(given: dict[str, Any]) -> None:
    """Do what `sum_terms` does, for one column after another."""
    item = {torch.float32: ctypes.c_float}[given["target dtype"]]

    def row(name: str, number: int, cols: int) -> torch.Tensor:
        at = given[name] + number * given[f"{name}_stride"] * ctypes.sizeof(item)
        memory = (ctypes.c_uint8 * (cols * ctypes.sizeof(item))).from_address(at)
        return torch.frombuffer(memory, dtype=given["target dtype"])

    rows, cols = given["rows"], given["cols"]
    for i in range(rows):
        terms = [row("slots", at * given["slot_rows"] + i, cols) for at in range(given["COUNT"])]
        terms.insert(given["own_at"], row("own", i, cols))
        row("target", i, cols).copy_(sum(terms))


def gated() -> None:
    """Any number of rows is multiplied by kernels of the pack; each is loaded once."""
    arrays = OnDouble()
    kernels = OwnKernels(lambda: arrays)
    control.reset()
    stand_in_for({"gated_gemm": multiply})
    loads = set()
    for rows, n, k in ((ROWS, 512, 256), (1, 512, 256), (77, 1024, 512), (ROWS, 512, 256)):
        own, window = arrays.matrix(rows, k), arrays.matrix(rows, k)
        weight, c = arrays.matrix(n, k).T, arrays.matrix(2 * rows, n)
        words = arrays.place([0] * 64, "int32")
        parts = [GatedPart("own", 0, 0, rows), GatedPart("window", 0, rows, rows, DATA)]
        stop = arrays.place([0], "int32")
        made = prepared(kernels, parts, n, k, "bfloat16", stop)
        words[DATA] = 1
        operands = {"own": own, "window": window, "b": weight, "c": c, "words": words}
        launch = kernels.arm(made, operands, 0)
        loads.add(control.count("cubin"))
        for _ in range(2):
            c.fill_(torch.nan)
            launch()
            arrays.wait()
            want = torch.cat([own, window]).double() @ weight.double()
            off = (c.double() - want).abs().max() / want.abs().max()
            assert off < 2 * torch.finfo(torch.bfloat16).eps, off
    assert len(loads) <= 3, "a kernel is loaded again"
    assert "triton" not in sys.modules


def sums() -> None:
    arrays = OnDouble()
    kernels = OwnKernels(lambda: arrays)
    stand_in_for({"sum_terms": added})
    for rows, cols in ((5, 64), (9, 33)):
        slots, own = arrays.matrix(3 * rows, cols, "float32"), arrays.matrix(rows, cols, "float32")
        target = arrays.matrix(rows, cols, "float32")
        work = Sum(WHOLE, 3, rows, WHOLE, 1, None, WHOLE)
        operands = {"slots": slots[:rows], "own": own, "bias": None, "target": target}
        launch = kernels.launch_of(kernels.prepare(work, SETTING), operands, 0)
        assert launch is not None
        loading.enqueue(launch)
        arrays.wait()
        want = slots.reshape(3, rows, cols).sum(0) + own
        assert torch.allclose(target, want, atol=1e-5)


def lacking() -> None:
    """What the pack lacks is an error that says what to do."""
    arrays = OnDouble()
    kernels = OwnKernels(lambda: arrays)
    own, c = arrays.matrix(8, 33, "float32"), arrays.matrix(8, 50, "float32")
    weight, words = arrays.matrix(33, 50, "float32"), arrays.place([0] * 64, "int32")
    parts = [GatedPart("own", 0, 0, 8)]
    made = prepared(kernels, parts, 50, 33, "float32", words)
    operands = {"own": own, "b": weight, "c": c, "words": words}
    with expected(EngineError, r"not in the pack \(1 of gated_gemm\); .*pip install triton"):
        kernels.arm(made, operands, 0)
    arrays.capability = 86
    with expected(EngineError, "no pack of kernels for sm_86; .*pip install triton"):
        kernels.arm(made, operands, 0)


def described() -> None:
    """Launches are described from the pack's records, and their sizes are the driver's."""
    arrays = OnDouble()
    kernels = OwnKernels(lambda: arrays)
    stand_in_for({"sum_terms": added, "gated_gemm": multiply})
    rows, n, k = 40, 64, 64
    own, window, c = (arrays.matrix(*shape) for shape in ((rows, k), (rows, k), (2 * rows, n)))
    words = arrays.place([0] * 64, "int32")
    parts = [GatedPart("own", 0, 0, rows), GatedPart("window", 0, rows, rows, DATA)]
    made = prepared(kernels, parts, n, k, "bfloat16", words)
    weight = arrays.matrix(n, k).T
    operands = {"own": own, "window": window, "b": weight, "c": c, "words": words}
    places = {"own": Slot(0), "window": Slot(1), "b": Slot(2), "c": Slot(3), "words": Signal()}
    spec = kernels.described(made, operands, places)
    assert spec is not None
    with expected(ValueError, "no own words"):  # which is looked at behind the sizes
        _native.GpuCall(loading.gpu(0), spec.native, 4)

    slots, mine = arrays.matrix(3 * rows, n, "float32"), arrays.matrix(rows, n, "float32")
    target = arrays.matrix(rows, n, "float32")
    at = {"slots": Slot(0), "own": Slot(1), "target": Slot(2)}
    given = {"slots": slots[:rows], "own": mine, "bias": None, "target": target}
    work = Sum(WHOLE, 3, rows, WHOLE, 2, None, WHOLE)
    summed = kernels.described(kernels.prepare(work, SETTING), given, at)
    assert summed is not None
    call = _native.GpuCall(loading.gpu(0), summed.native, 3)
    call.run([each.data_ptr() for each in (slots, mine, target)], [4 * n] * 3, arrays.stream)
    arrays.wait()
    assert torch.allclose(target, slots.reshape(3, rows, n).sum(0) + mine, atol=1e-5)


SCENARIOS = {"described": described, "gated": gated, "sums": sums, "lacking": lacking}

if __name__ == "__main__":
    torch.manual_seed(3)
    for scenario in sys.argv[1:]:
        SCENARIOS[scenario]()
        print(scenario, "right")
