"""Holds descriptions of launches against what Triton compiles and passes, for test_launching.py."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import triton
from compiling import on_gpu
from triton.backends.nvidia import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from ficco.core.errors import EngineError, FiccoError, InputError
from ficco.core.private import triton_core
from ficco.kernels import (
    gated,
    loading,
    one_kernel,
    one_kernel_all_reduce,
    one_kernel_gather,
    one_kernel_pool,
    summing,
)
from ficco.kernels.arrays import Bulk, library_of
from ficco.kernels.compiling import compile_variant, why_unknown
from ficco.kernels.gated import Gate, Matrices, prepare
from ficco.kernels.native_launch import (
    Code,
    Pitch,
    Place,
    Signal,
    Slot,
    described,
    parameter_rows,
)
from ficco.kernels.one_kernel import Control
from ficco.kernels.records import Places, places_of
from ficco.kernels.variants import Launch, Passed, flattened, passed, variant_of
from ficco.lowering import lower_rank
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.plan.schedule import Schedule
from ficco.plan.tables import GatedPart
from ficco.program.passes.one_kernel_tables import table_of
from ficco.program.tiling import Tile

Case = tuple[Launch, dict[str, Place]]
# Triton 3.8 has one launcher for all kernels, which takes a kernel's arguments as one.
ONE_LAUNCHER = not hasattr(driver, "make_launcher")
BASE_ARGUMENTS = 16 if ONE_LAUNCHER else 13  # of Triton's launcher, before those of the kernel
BYTES = {"CUtensorMap": 128, "CUdeviceptr": 8} | {
    f"{sign}int{bits}_t": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)
}
SMALL = Tile(64, 64, 64, 4, 4, 2, 1, 1.0)
PARTS = [GatedPart("own", 0, 0, 70), GatedPart("window", 3, 70, 50, 11)]


def words(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def gated_case(dtype: torch.dtype, n: int, k: int, pad: int, turned: bool, bias: bool) -> Case:
    """Return a launch of the gated GEMM. Rows are `pad` elements further apart than long."""
    device = torch.device("cpu")
    own, window = (torch.zeros(130, k + pad, dtype=dtype)[:, :k] for _ in range(2))
    b = (
        torch.zeros(n, k + pad, dtype=dtype)[:, :k].t()
        if turned
        else torch.zeros(k, n, dtype=dtype)
    )
    c = torch.zeros(120, n, dtype=dtype)
    table = prepare(PARTS, n, k, dtype, device, SMALL)
    matrices = Matrices(own, window, b, torch.zeros(1, n, dtype=dtype) if bias else None, c)
    launch = on_gpu(gated.launch_of(table, matrices, Gate(words(64), words(4), words(4), 10**9)))
    arguments = launch.arguments
    item = dtype.itemsize
    places: dict[str, Place] = {
        "own": Slot(0), "window": Slot(1), "b": Slot(2), "c": Slot(3), "words": Signal(),
        "c_stride": Pitch(3, item),
    }  # fmt: skip
    if not bias:
        places["bias"] = Slot(3)
    for name, slot in (("own", 0), ("window", 1)):
        if not isinstance(arguments[name], Bulk):
            places[f"{name}_stride"] = Pitch(slot, item)
    if not isinstance(arguments["b"], Bulk):
        places["b_col_stride" if turned else "b_deep_stride"] = Pitch(2, item)
    return launch, places


def sum_case(cols: int) -> Case:
    target, own, slots = (torch.zeros(20, cols, dtype=torch.float16) for _ in range(3))
    places: dict[str, Place] = {
        "target": Slot(3), "slots": Slot(1, 2), "own": Slot(0), "bias": Slot(3),
        "target_stride": Pitch(3, 2), "slots_stride": Pitch(1, 2), "own_stride": Pitch(0, 2),
    }  # fmt: skip
    return summing.launch_of(slots[2:], 5, 2, own, 1, None, target), places


def one_kernel_case(gathers: bool, dtype: torch.dtype, bias: bool, pad: int) -> Case:
    """Return a launch that is a whole call of rank 1 of 2; a gather's has two weights, and x."""
    name = str(dtype).removeprefix("torch.")
    n, k = 24 + 40 * pad, 64
    if gathers:
        kept = (Output((k, k), "", "gathered"),) * bias
        outputs = (Output((n, n), bias=bias), *kept, Output((n, n), "w1"))
        problem = Problem("all_gather_matmul", 2, (3, 4), k, outputs, name)
        plan = lower_rank(problem, Schedule.named("gather_sm"), 1)
    else:
        problem = Problem.chunked("matmul_all_reduce", 2, 7, n, 2 * k, name)
        plan = lower_rank(problem, Schedule.named("two_shot_sm"), 1)
    slots: list[Any] = []

    def made(rows: int, cols: int, turned: bool = False) -> tuple[torch.Tensor, Slot]:
        matrix = torch.zeros(cols if turned else rows, (rows if turned else cols) + pad)
        matrix = matrix.to(dtype)[:, : rows if turned else cols]
        slots.append(matrix.t() if turned else matrix)
        return slots[-1], Slot(len(slots) - 1)

    table: Any = table_of(plan)
    given = {"x": made(4 if gathers else 7, k)}
    for names, turned in zip(table.outputs, (False, True), strict=False):
        given |= {names.w: made(k, n, turned), names.y: made(7, n)}
        if names.bias:
            given[names.bias] = made(1, n)
    if gathers and table.kept:
        given[table.kept] = made(7, k)
    operands, places = ({name: each[i] for name, each in given.items()} for i in range(2))
    windows = Places(*[[[0] * 2] * 2] * 2, torch.zeros(3, dtype=torch.int32))
    kernel: Any = one_kernel_gather if gathers else one_kernel_all_reduce
    prepared = kernel.prepare(table, windows, library_of(torch.device("cpu")))
    launch = one_kernel.launch(prepared, operands, Control(5, words(4), words(4), 10**9))
    return on_gpu(launch), places_of(launch, operands, places)


def cases() -> Iterator[Case]:
    for number, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        yield gated_case(dtype, 192, 128, 16, number != 1, number == 0)
    yield gated_case(torch.bfloat16, 130, 72, 3, True, False)  # no descriptors
    yield gated_case(torch.float16, 1, 65, 0, False, True)  # a stride of 1 that is a pitch, too
    yield sum_case(512)
    yield sum_case(1)
    yield one_kernel_case(False, torch.float16, False, 0)
    yield one_kernel_case(True, torch.bfloat16, True, 0)
    yield one_kernel_case(True, torch.float32, False, 3)


def code_of(launch: Launch) -> tuple[Code, Any]:
    """Return a launch's kernel, and what Triton made of it."""
    variant = variant_of(launch)
    made = compile_variant(variant, 90)
    return loading.code_of(variant, made.record), made.made


def tensors(case: Case) -> dict[int, tuple[int, int]]:
    """Return address and pitch of every slot, and of words at -1, as the arguments have them."""
    launch, places = case
    found: dict[int, tuple[int, int]] = {}
    arguments = flattened(launch.arguments)
    for name, place in places.items():
        given = arguments[name]
        base = given.base if isinstance(given, Bulk) else given
        if isinstance(place, Signal):
            found[-1] = base.data_ptr(), 4
        elif isinstance(place, Slot):
            pitch = max(base.stride()) * base.itemsize
            if base.dim() < 2:
                pitch = base._base.stride(0) * base.itemsize if base._base is not None else 4
            start = base.data_ptr() - place.row * pitch - place.byte
            found[place.slot] = start, pitch
    return found


def values(rows: list[list[int]], slots: Mapping[int, tuple[int, int]]) -> list[Any]:
    """Return what native code passes for such rows, as Triton's launcher would be given it."""
    found: list[Any] = []
    for kind, count, divisor, value, slot, row, byte, _, element, *more in rows:
        if kind == 0:
            found.append(value % (1 << 8 * count))
        elif kind == 5:
            found.append(0)  # as described arguments have it
        elif kind == 2:
            found.append(slots[-1][0] + 4 * value)
            assert found[-1] % divisor == 0
        elif kind == 3:
            pitch = slots[slot][1] // element
            assert pitch % divisor == 0 and value in (0, pitch)
            if count:
                found.append(pitch)
        else:
            address = slots[slot][0] + row * slots[slot][1] + byte
            assert address % divisor == 0
            if kind == 1:
                found.append(address)
                continue
            deep, wide, box_rows, box_cols, type_, swizzle, fill = more
            pitch = slots[slot][1] // element
            # as Triton's own function takes them
            found.append((address, swizzle, element, type_, (box_rows, box_cols), (deep, wide),
                          (pitch, 1), fill))  # fmt: skip
    return found


def of_triton(kernel: Any, arguments: Mapping[str, Any]) -> list[Any]:
    """Return what Triton's launcher passes to the kernel."""

    def fill(*made: Any) -> Any:
        return tuple(tuple(part) if isinstance(part, (list, torch.Size)) else part for part in made)

    name = "fill_tma_descriptor_tiled" if ONE_LAUNCHER else "fill_tma_descriptor"
    triton.runtime.driver.set_active(SimpleNamespace(utils=SimpleNamespace(**{name: fill})))
    signature = dict(kernel.src.signature)
    launcher = driver.wrap_handle_tensordesc(
        lambda *given: given[BASE_ARGUMENTS:], signature, kernel.metadata.tensordesc_meta
    )

    def tensor(value: Any) -> Any:
        if not isinstance(value, Bulk):
            return value
        base, block, _ = value
        return TensorDescriptor(base, base.shape, base.stride(), list(block))

    passed = [tensor(arguments[name]) for name in signature]
    if ONE_LAUNCHER:
        (given,) = launcher(*range(BASE_ARGUMENTS), tuple(passed))
    else:
        given = launcher(*range(BASE_ARGUMENTS), *passed)
    kinds: list[Any] = []
    for kind in signature.values():
        bulk = isinstance(kind, str) and kind.startswith("tensordesc")
        kinds += ["map", "i32", "i32", "i64", "i64"] if bulk else [kind]
    pairs: list[tuple[str, Any]] = []
    for kind, value in zip(kinds, given, strict=True):
        pairs += zip(kind, value, strict=True) if type(kind) is tuple else [(kind, value)]
    found: list[Any] = []
    for kind, value in pairs:
        if kind == "constexpr":
            continue
        if kind == "map":
            found.append(value)
        elif isinstance(value, torch.Tensor):
            found.append(value.data_ptr())
        else:
            found.append(int(value) % (1 << int(kind[1:])))
    return [*found, 0, 0]  # scratch memory


def declared_by_ptx(kernel: Any) -> list[tuple[int, int]]:
    """Return bytes and alignment of every parameter in the PTX."""
    text = kernel.asm["ptx"]
    (header,) = re.findall(r"\.visible \.entry \w+\((.*?)\n\)", text, re.DOTALL)
    found = []
    for line in header.strip().split("\n"):
        block = re.match(r"\s*\.param \.align (\d+) \.b8 \w+\[(\d+)\]", line)
        plain = re.match(r"\s*\.param \.[bus](\d+) ", line)
        assert block or plain, line
        count = int(plain[1]) // 8 if plain else int(block[2])
        found.append((count, count if plain else int(block[1])))
    return found


def passed_by_triton(kernel: Any) -> list[int]:
    """Return the bytes of every parameter that Triton's launcher passes."""
    meta = kernel.metadata.tensordesc_meta
    if ONE_LAUNCHER:  # it adds the two scratch addresses in C
        kinds = driver.expand_signature(kernel.src.signature.values(), meta, "nvTmaDesc")
        kept = [driver.ty_to_cpp(kind) for kind in kinds if kind != "constexpr"]
        return [BYTES[kind] for kind in [*kept, "CUdeviceptr", "CUdeviceptr"]]
    source = driver.make_launcher(kernel.src.constants, kernel.src.signature, meta)
    (head,) = re.findall(r"static void _launch\((.*?)\) \{", source)
    (given,) = re.findall(r"void \*params\[\] = \{ (.*?) \};", source)
    types = {name: kind for kind, name in re.findall(r"(\w+) (\w+)(?:,|$)", head)}
    return [BYTES[types[name.strip().removeprefix("&")]] for name in given.split(",")]


def layout() -> None:
    """Sizes, alignments, order and values are those of the PTX and of Triton's launcher."""
    for case in cases():
        launch, places = case
        code, made = code_of(launch)
        rows = parameter_rows(code, launch.arguments, places)
        sizes = [row[1] for row in rows if row[1]]
        assert declared_by_ptx(made) == [(count, 64 if count == 128 else count) for count in sizes]
        assert passed_by_triton(made) == sizes
        assert values(rows, tensors(case)) == of_triton(made, launch.arguments), launch.kernel.name
        assert all(len(row) == 16 for row in rows)


def held() -> None:
    """What a kernel was compiled for is asked of every call."""
    launch, places = gated_case(torch.bfloat16, 192, 128, 16, True, False)
    rows = parameter_rows(code_of(launch)[0], launch.arguments, places)
    assert [row[2] for row in rows if row[0] == 1] == [16, 16], "addresses of bias and c"
    assert [row[2] for row in rows if row[0] == 3] == [1, 1, 1, 16], "pitches of own, window, b, c"
    launch, places = gated_case(torch.bfloat16, 130, 72, 3, True, False)
    rows = parameter_rows(code_of(launch)[0], launch.arguments, places)
    assert {row[2] for row in rows} == {1}, "of odd sizes nothing is known"


def pooled() -> None:
    """Tuples of tables are parameters one after another; native code asks for their alignment."""
    for pad, bytes_, elements, weighted in ((0, 16, 8, False), (3, 2, 1, False), (0, 16, 8, True)):
        count, dim = 3, 16
        modes = ("mean", "weighted", "sum") if weighted else ("sum",) * 3
        problem = Problem(
            "embedding_all_to_all", 2, (4, 4), 1, (Output((dim,) * 2),), "bfloat16",
            tables=((9,) * count, (9,)), lookups=((20, 20, 0), (20,)), modes=(modes, ("sum",)),
        )  # fmt: skip
        table = table_of(lower_rank(problem, Schedule.named("pool_sm"), 0))
        nowhere = [[0, 0], [0, 0]]
        arrays = library_of(torch.device("cpu"))
        made = one_kernel_pool.prepare(table, Places(nowhere, nowhere), arrays)
        tables = [torch.zeros(9, dim + pad, dtype=torch.bfloat16)[:, :dim] for _ in range(count)]
        indices = [torch.zeros(1, n, dtype=torch.int64) for n in (20, 20, 0)]
        offsets = [torch.zeros(1, 8, dtype=torch.int64) for _ in range(count)]
        y = torch.zeros(4, 4 * dim + pad, dtype=torch.bfloat16)[:, : 4 * dim]
        weights = [torch.zeros(1, 20) if mode == "weighted" else None for mode in modes]
        slots = {"y0": Slot(9)}
        operands: dict[str, Any] = {"y0": y}
        for i in range(count):
            names = [f"{name}{i}" for name in ("table", "indices", "offsets", "weights")]
            given = (tables[i], indices[i], offsets[i], weights[i])
            operands |= dict(zip(names, given, strict=True))
            at = (Slot(i), Slot(3 + i), Slot(6 + i), Slot(10))
            slots |= dict(zip(names, at, strict=True))
        launch = one_kernel.launch(made, operands, Control(5, words(1), words(1), 1))
        places = places_of(launch, operands, slots)
        code, kernel = code_of(launch)
        rows = parameter_rows(code, launch.arguments, places, launch.divisors)
        sizes = [row[1] for row in rows if row[1]]
        assert declared_by_ptx(kernel) == [(size, size) for size in sizes]
        by_name = dict(zip([each.name for each in code.parameters], rows, strict=False))
        assert [by_name[f"tables.{i}"][4] for i in range(8)] == [0, 1, 2, 0, 0, 0, 0, 0]
        read = [by_name[f"weights.{i}"][4] for i in range(8 if weighted else 1)]
        assert read == ([10] * 8 if weighted else [9]), "weights of one table, or y in their place"
        assert launch.arguments["means"] == (1 if weighted else 0)
        assert launch.arguments["weighted"] == (2 if weighted else 0)
        assert {by_name[name][2] for name in ("y", "tables.0", "tables.2")} == {bytes_}
        assert {by_name[name][2] for name in ("y_stride", "strides.1")} == {elements}
        assert {by_name[name][2] for name in ("indices.0", "offsets.2", "ends.0")} == {1}
        assert by_name["ends.2"][0] == 0 == by_name["ends.2"][3], "no lookups: a constant"
        assert by_name["ends.1"][0] == 3, "the number of lookups is a pitch"


def numbers() -> None:
    """Numbers of all widths are passed as they are, and others are refused."""
    wanted = {"small": ("i8", -7), "long": ("i64", -(1 << 40)), "bits": ("u32", (1 << 32) - 5)}
    parameters = [Passed(name, kind, 1) for name, (kind, _) in wanted.items()]
    given = {name: value for name, (_, value) in wanted.items()}
    rows = parameter_rows(Code("numbers", tuple(parameters), 32, 0), given, {})
    assert [row[:4] for row in rows] == [
        [0, 1, 1, -7], [0, 8, 1, -(1 << 40)], [0, 4, 1, (1 << 32) - 5], [0, 8, 1, 0], [0, 8, 1, 0]
    ]  # fmt: skip
    real = Code("real", (Passed("factor", "fp32", 1),), 32, 0, function=9)
    refused(EngineError, "'factor' as fp32", real, {"factor": 0.5}, {})


def refused(kind: type[FiccoError], pattern: str, code: Code, arguments: Any, places: Any) -> None:
    try:
        described(code, (2,), arguments, places)
    except kind as error:
        assert re.search(pattern, str(error)), f"{pattern!r} is not in: {error}"
        return
    raise AssertionError(f"no {kind.__name__} that says {pattern!r}")


def refusals() -> None:
    launch, places = gated_case(torch.bfloat16, 192, 128, 16, True, False)
    arguments = launch.arguments
    code, made = code_of(launch)
    refused(EngineError, "not loaded", code, arguments, places)
    code = code._replace(function=9)
    spec = described(code, (2,), arguments, places)
    assert spec.native[:5] == (9, (2, 1, 1), 128, made.metadata.shared, False)
    assert spec.parameters.shape[1] == 16 and spec.parameters.flags.c_contiguous
    assert described(code, (2,), arguments, places, chained=True).native[4]
    refused(EngineError, "3 descriptors, but has boxes for 2", code._replace(boxes=code.boxes[1:]),
            arguments, places)  # fmt: skip

    known = triton_core.facts_of(made)
    assert not why_unknown(known)
    for field, value, pattern in (
        ("triton_version", "3.10.0", "by Triton 3.10.0"),
        ("num_ctas", 2, "clusters of 2"),
        ("launch_cooperative_grid", True, "cooperative"),
        ("launch_pdl", True, "before it"),
        ("global_scratch_size", 64, "scratch"),
        ("profile_scratch_size", 64, "instrumented"),
        ("tensordesc_meta", [known.tensordesc_meta[0] | {"fp4_padded": True}] * 3, "4 bits"),
    ):
        assert pattern in why_unknown(known._replace(**{field: value}))
    for version in ("3.5.1", "3.7.0", "3.8.0", "3.9.0"):
        assert not why_unknown(known._replace(triton_version=version))

    for name, place, pattern in (
        ("nothing", Slot(0), "no argument 'nothing'"),
        ("ROWS", Slot(0), "no argument 'ROWS'"),
        ("c", Pitch(0, 2), "'c' is a pointer"),
        ("k", Slot(0), "'k' is an i32"),
        ("own", Signal(), "'own' is a descriptor"),
    ):
        refused(InputError, pattern, code, arguments, places | {name: place})
    refused(InputError, "pass a slot", code, arguments, {"words": Signal()})
    for name, value, pattern in (
        ("k", 1 << 31, "'k' is 2147483648"),
        ("k", 193, "a multiple of 16"),
        ("k", 1.5, "'k' is an i32, not 1.5"),
    ):
        refused(InputError, pattern, code, arguments | {name: value}, places)
    less = {name: value for name, value in arguments.items() if name != "places"}
    refused(InputError, "'places', which has no value", code, less, places)


def by_triton() -> None:
    """Triton's own launch compiles kernels of the same types, with the same constants."""
    target = triton_core.Target("cuda", 90, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: target,
        )
    )
    made: list[Any] = []

    def compiled(function: Any, grid: Any, arguments: Any, options: Any) -> None:
        made.append(function.warmup(**arguments, **options, grid=grid))

    triton_core.load = compiled
    chosen = (gated_case(torch.bfloat16, 192, 128, 16, True, False), sum_case(1),
              one_kernel_case(False, torch.float16, False, 0),
              one_kernel_case(True, torch.bfloat16, True, 0))  # fmt: skip
    for launch, _ in chosen:
        loading._by_triton(launch)
        variant, kernel = variant_of(launch), made.pop()
        types = {each.name: each.type for each in passed(variant)}
        own = dict(variant.constants)
        constants = {
            ".".join([launch.kernel.parameters[i].name, *map(str, element)]): value
            for (i, *element), value in kernel.src.constants.items()
        }
        ones = {name: 1 for name in constants if name not in own}
        assert constants == own | ones, launch.kernel.name
        given = flattened(launch.arguments)
        assert all(given[name] == 1 for name in ones)
        signature = flattened(kernel.src.signature)
        found = {n: kind for n, kind in signature.items() if kind != "constexpr"}
        for name, kind in types.items():  # it passes numbers of tuples by what they are
            if "." in name and kind == "i64":
                types[name] = found.get(name, kind)
        same = {n: kind.replace(" ", "") for n, kind in types.items() if n not in ones}
        assert {n: kind.replace(" ", "") for n, kind in found.items()} == same, launch.kernel.name
        assert (kernel.metadata.num_warps, kernel.metadata.num_stages) == (
            launch.warps, launch.stages
        )  # fmt: skip


if __name__ == "__main__":
    for subject in (layout, held, pooled, numbers, refusals, by_triton):
        subject()
    print("right")
