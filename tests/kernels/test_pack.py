"""The pack of compiled kernels: made of the sources, whole, and in order."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from ficco.cli.packing import building, grid, ordering
from ficco.core.errors import EngineError
from ficco.core.machine import Machine
from ficco.engine.wanted import DescribedKernels, launches_in
from ficco.kernels import pack, sources
from ficco.kernels.arrays import Address, Described, DescribedArrays
from ficco.kernels.declarations import KERNELS
from ficco.kernels.variants import Launch, Variant, is_aligned, passed, variant_of
from ficco.lowering import lower_rank
from ficco.operators import OPERATORS
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.plan.schedule import Schedule

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
CAPABILITIES = sorted(grid.COVERAGE)
MOST_BYTES = 10_000_000  # of all files
MOST_PARAMETERS = 36  # of a kernel, with constants
MOST_RUNS = 60  # of the assembler; of four outcomes one is missed once in 10^7
SAMPLE = {80: 1, 90: 3}  # variants that are compiled again


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_it_is_made_of_these_sources(capability: int) -> None:
    manifest = pack.opened(capability).manifest
    assert manifest["sources"] == sources.digest(), "make it again: python -m ficco.cli.packing"
    assert manifest["triton"] == building.TRITON and manifest["capability"] == capability
    assert manifest["kernel_sources"] == building._kernel_sources()


def test_its_files_are_small() -> None:
    assert pack.capabilities() == CAPABILITIES
    assert sum(path.stat().st_size for path in pack.FOLDER.iterdir()) < MOST_BYTES


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_it_has_what_the_grid_wants_and_nothing_else(capability: int) -> None:
    wanted = {variant.key: variant for variant in grid.variants(capability)}
    found = pack.opened(capability).manifest["kernels"]
    assert found.keys() == wanted.keys()
    for key, variant in wanted.items():
        assert found[key]["variant"] == variant.text
        assert Variant.of_text(variant.text) == variant
        assert found[key]["name"] == variant.kernel and found[key]["threads"] == 32 * variant.warps


@pytest.mark.parametrize("path", sorted(pack.FOLDER.glob("*.zip")), ids=lambda path: path.stem)
def test_every_binary_has_the_digest_of_its_record(path: Path) -> None:
    opened = pack.Pack(path)
    with pack.keeping_blocks():
        for record in opened.manifest["kernels"].values():
            assert opened.find(Variant.of_text(record["variant"])) is not None


def test_damaged_packs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sm_80.zip"
    shutil.copy(pack.FOLDER / path.name, path)
    variant = grid.variants(80)[0]
    good, whole = pack.Pack(path), path.read_bytes()
    record = good.manifest["kernels"][variant.key]
    for field, value in (("sha256", "0" * 64), ("cubin", [record["cubin"][0], 0, 9]), ("cubin", 3)):
        with monkeypatch.context() as edit:
            edit.setitem(record, field, value)
            with pytest.raises(EngineError, match=r"is damaged.*install ficco again"):
                good.find(variant)
    monkeypatch.setattr(pack, "FOLDER", tmp_path)
    for contents in (b"", b"junk" * 99, whole[:-99], whole[: len(whole) // 2]):
        path.write_bytes(contents)
        monkeypatch.setattr(pack, "_opened", {})
        with pytest.raises(EngineError, match=r"is damaged.*install ficco again"):
            pack.opened(80)
        pack._why_unusable.cache_clear()
        assert "is damaged" in pack._why_unusable(80)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(EngineError, match="not a regular file"):
        pack.Pack(path)
    pack._why_unusable.cache_clear()


def test_tests_are_run_by_the_triton_that_makes_the_pack() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    assert f"triton=={building.TRITON}" in project["optional-dependencies"]["test"]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_sample_compiled_again_is_the_same(capability: int, tmp_path: Path) -> None:
    """Which variants is drawn by the sources, so that a change of them draws others.

    The PTX text is the same each time, and is in order. The assembler schedules some kernels in one
    of a few ways (four of one kernel, by turns): the cubin is one of them.
    """
    triton = pytest.importorskip("triton")
    if triton.__version__ != building.TRITON:
        pytest.skip(f"the pack is made by Triton {building.TRITON}")
    draw = random.Random(sources.digest())
    variants = draw.sample(grid.variants(capability), SAMPLE[capability])
    places = building.compile_all(variants, capability, tmp_path, 2, lambda text: None)
    for variant, stem in places.items():
        found = pack.opened(capability).find(variant)
        assert found is not None
        record = json.loads(stem.with_suffix(".json").read_text())
        assert record["ptx_sha256"] == found.record["ptx_sha256"], variant.text
        made = stem.with_suffix(".cubin").read_bytes()
        runs = 0
        while made != found.cubin:
            runs += 1
            assert runs < MOST_RUNS, variant.text
            made = assembled(stem.with_suffix(".ptx"))


def assembled(text: Path) -> bytes:
    """Return what Triton's assembler makes of a PTX file."""
    import triton

    target = re.search(r"^\.target (\w+)", text.read_text(), re.MULTILINE)
    assert target is not None
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    target_file = text.with_suffix(".again")
    command = [tool, f"--gpu-name={target[1]}", text, "-o", target_file]
    subprocess.run(command, check=True, timeout=60)
    return target_file.read_bytes()


def test_kernels_with_signals_are_checked_when_they_are_packed() -> None:
    assert {"gated_gemm", "pushing_gemm", "summing_gemm"} <= ordering.CHECKS.keys()
    records = pack.opened(90).manifest["kernels"].values()
    assert ordering.CHECKS.keys() <= {record["name"] for record in records}
    assert all(record["ptx_sha256"] for record in records)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Variant]]:
    """Return PTX of one variant of each kernel whose order is checked, compiled here."""
    triton = pytest.importorskip("triton")
    if triton.__version__ != building.TRITON:
        pytest.skip(f"the pack is made by Triton {building.TRITON}")
    chosen = {
        each.kernel: each
        for each in grid.variants(90)
        if each.kernel in ordering.CHECKS and dict(each.constants).get("CHAINED", 1)
    }
    folder = tmp_path_factory.mktemp("texts")
    places = building.compile_all(tuple(chosen.values()), 90, folder, 2, lambda text: None)
    return {
        each.kernel: (stem.with_suffix(".ptx").read_text(), each) for each, stem in places.items()
    }


MOVED = "// moved"


def removed(pattern: str, text: str) -> str:
    """Return the text without what matches: so many characters of a comment stand there."""
    changed, count = re.subn(pattern, MOVED, text)
    assert count, f"nothing matches {pattern!r}"
    return changed


def last_moved_to_begin(pattern: str, text: str) -> str:
    """Return the text with the last that matches before all else."""
    found = list(re.finditer(pattern, text))[-1]
    return found[0] + text[: found.start()] + text[found.end() :]


@pytest.mark.parametrize(
    ("kernel", "change", "pattern"),
    [
        ("gated_gemm", removed, ordering.FENCE),
        ("gated_gemm", removed, ordering.MET),
        ("gated_gemm", removed, ordering.ACQUIRE),
        ("gated_gemm", last_moved_to_begin, ordering.RELEASE),
        ("gated_gemm", removed, r"atom\.(\w+\.)*acq_rel"),
        ("pushing_gemm", removed, r"bar\.sync"),
        ("pushing_gemm", last_moved_to_begin, ordering.RELEASE),
        ("pushing_gemm", removed, ordering.COUNT),
        ("summing_gemm", removed, ordering.MET),
        ("summing_gemm", removed, ordering.ACQUIRE),
        ("one_kernel_all_reduce_gemm", removed, r"griddepcontrol\.wait"),
        ("one_kernel_all_reduce_gemm", removed, r"barrier\.red"),
        ("one_kernel_all_reduce_gemm", removed, r"atom\.relaxed\.gpu\.global\.add"),
        ("one_kernel_gather_gemm", removed, r"barrier\.sync"),
        ("one_kernel_gather_gemm", removed, r"barrier\.red"),
        ("one_kernel_gather_gemm", removed, r"prefetch\.global\.L2"),
        ("one_kernel_gather_gemm", removed, ordering.RELEASE),
        ("sending_gemm", removed, r"barrier\.sync"),
        ("sending_gemm", removed, r"barrier\.red"),
        ("sending_gemm", removed, ordering.RELEASE),
        ("sending_gemm", removed, ordering.SENT_COUNT),
        ("sending_gemm", last_moved_to_begin, ordering.SENT_COUNT),
        ("sending_gemm", last_moved_to_begin, ordering.RELEASE),
    ],
)
def test_a_fence_or_word_that_is_missing_is_seen(
    kernel: str, change: object, pattern: str, texts: dict[str, tuple[str, Variant]]
) -> None:
    text, variant = texts[kernel]
    ordering.CHECKS[kernel](text, variant)
    changed = change(pattern, text)  # type: ignore[operator]
    with pytest.raises((AssertionError, ValueError)):
        ordering.CHECKS[kernel](changed, variant)


def test_a_bulk_store_is_seen(texts: dict[str, tuple[str, Variant]]) -> None:
    text, variant = texts["pushing_gemm"]
    with pytest.raises(AssertionError, match="bulk stores"):
        ordering.CHECKS["pushing_gemm"](
            text + "cp.async.bulk.tensor.2d.global.shared::cta", variant
        )


def test_declarations_are_those_of_the_functions() -> None:
    pytest.importorskip("triton")
    from ficco.kernels.compiling import function_of

    for kernel in KERNELS.values():
        function = function_of(kernel)
        names = [(each.name, each.is_constexpr) for each in function.params]
        assert names == [(each.name, each.kind == "=") for each in kernel.parameters], kernel.name
        assert len(names) <= MOST_PARAMETERS, f"{kernel.name}: make tuples of its parameters"
        for each, said in zip(function.params, kernel.parameters, strict=True):
            assert each.do_not_specialize == said.unknown, f"{kernel.name}: {each.name}"
            if said.kind in ("i32", "i64"):
                assert each.annotation_type == said.kind, f"{kernel.name}: {each.name}"


def test_the_digest_covers_all_device_code() -> None:
    triton = pytest.importorskip("triton")
    from ficco.kernels.compiling import function_of

    found, new = set(), [function_of(kernel) for kernel in KERNELS.values()]
    while new:
        function = new.pop()
        if function in found:
            continue
        found.add(function)
        names = set(re.findall(r"\w+", "".join(function.raw_src)))
        known = function.fn.__globals__
        new += [known[n] for n in names if isinstance(known.get(n), triton.JITFunction)]
    modules = {function.fn.__module__.removeprefix("ficco.kernels.") for function in found}
    assert modules <= set(sources.MODULES) and len(found) > 20


def test_the_digest_is_of_code_alone() -> None:
    text = 'def f(a):\n    """Say."""\n    return a  # and why\n'
    same = 'def f(a):\n    """Say\n    more."""\n\n    # Why.\n    return a\n'
    assert sources.code_of(text) == sources.code_of(same)
    assert sources.code_of(text) != sources.code_of(text.replace("return a", "return a + 1"))
    assert sources.code_of(text) != sources.code_of(text.replace('"""Say."""', 'x = "Say."'))
    # Python 3.12 unparses the second line with other quotes, and has fields for types.
    quoted = "def f(a):\n    return f'{a[0]!r:>4} \"\"'\n"
    assert hashlib.sha256(sources.code_of(quoted).encode()).hexdigest()[:8] == "1574da37"


@pytest.mark.parametrize(
    ("module", "code", "kernels"),
    [
        ("signals", "mul.lo.u32 last, $5, $6;", {"one_kernel_gather_gemm"}),
        (
            "signal_ptx", "{_RELEASES[op]} [",
            {"one_kernel_pool", "pulled_rows", *ordering.CHECKS},
        ),
        ("pulling_kernel", "tl.zeros((SIZE,)", {"pulled_rows"}),
        (
            "tile_product", "tl.dot(",
            {"gated_gemm", "pushing_gemm", "summing_gemm", "sending_gemm"},
        ),
        (
            "one_kernel_handshake", "tl.atomic_add(gates + _DONE",
            {"one_kernel_gather_gemm", "one_kernel_pool", "sending_gemm"},
        ),
    ],
)  # fmt: skip
def test_a_change_of_code_changes_the_digests_of_the_kernels_that_reach_it(
    module: str, code: str, kernels: set[str]
) -> None:
    texts = {name: sources._text_of(name) for name in sources.MODULES}
    assert code in texts[module]
    other = texts | {module: texts[module].replace(code, f"1 + {code}")}
    changed = {
        name for name, each in KERNELS.items()
        if sources._digest_of(other, each.module, name) != sources.digest_of(each.module, name)
    }  # fmt: skip
    assert changed == kernels


def test_unchanged_kernels_are_taken_from_the_present_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants = grid.variants(90)
    pooled = [variant for variant in variants if variant.kernel == "pool_tables"][:2]
    sums = [variant for variant in variants if variant.kernel == "sum_terms"][:2]
    assert len(pooled) == len(sums) == 2
    real = sources.digest_of

    def digest_of(module: str, function: str) -> str:
        return "changed" if function == "sum_terms" else real(module, function)

    monkeypatch.setattr(sources, "digest_of", digest_of)
    places = {variant: tmp_path / variant.key for variant in (*pooled, *sums)}
    assert building._take_unchanged(90, places) == 2
    for variant in pooled:
        found, stem = pack.opened(90).find(variant), places[variant]
        assert found is not None and stem.with_suffix(".cubin").read_bytes() == found.cubin
        record = json.loads(stem.with_suffix(".json").read_text())
        assert record.items() <= pack.opened(90).manifest["kernels"][variant.key].items()
        assert "name" in record and not {"variant", "cubin"} & record.keys()
    for variant in sums:
        assert not places[variant].with_suffix(".json").exists()


def test_it_is_not_used_where_it_is_not_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FICCO_PACK", raising=False)
    variant = grid.variants(80)[0]
    assert pack.find(variant, 80) is not None
    assert "no pack of kernels for sm_86" in pack.why_not(86)
    assert not pack.why_not(90) and not pack.why_not(80)
    monkeypatch.setenv("FICCO_PACK", "0")
    assert "FICCO_PACK=0" in pack.why_not(90)
    monkeypatch.delenv("FICCO_PACK")
    monkeypatch.setattr(sources, "digest", lambda: "other")
    pack._why_unusable.cache_clear()
    try:
        assert "other kernel sources" in pack.why_not(90)
    finally:
        pack._why_unusable.cache_clear()


def test_variants_have_two_classes_of_sizes() -> None:
    kernel = KERNELS["sum_terms"]

    def launch(rows: int, cols: int, at: int = 0, **more: int) -> Launch:
        matrix = Described((1 << 20) + at, (rows, cols), (cols, 1), "bfloat16")
        given = dict.fromkeys(("target", "slots", "own", "bias"), matrix)
        numbers = {"rows": rows, "cols": cols, "slot_rows": rows, "own_at": 0, "has_bias": 0}
        strides = dict.fromkeys(("target_stride", "slots_stride", "own_stride"), cols)
        constants = {"COUNT": 1, "ROWS": 8, "COLS": 512}
        arguments = given | numbers | strides | constants | more
        return Launch(kernel, arguments, (1,), 4, arrays=DescribedArrays(90, 132))

    even = variant_of(launch(16, 64))
    assert even.aligned and variant_of(launch(7, 64, has_bias=1, own_at=1)) == even
    assert not is_aligned(launch(16, 60)) and not variant_of(launch(16, 64, at=8)).aligned
    assert variant_of(launch(16, 64)._replace(odd=True)) == variant_of(launch(3, 33))
    assert {each.divisor for each in passed(even) if each.name == "rows"} == {1}
    assert {each.divisor for each in passed(even) if each.name == "cols"} == {16}
    assert variant_of(launch(16, 64, COUNT=2)) != even
    assert Address(5).data_ptr() == 5


def test_every_element_of_a_tuple_counts() -> None:
    pytest.importorskip("triton")
    from ficco.kernels.compiling import source_of

    outputs = (Output((64, 64), "w0"), Output((64, 64), "w1", bias=True))
    problem = Problem("all_gather_matmul", 2, (4, 4), 64, outputs, "bfloat16")
    plan = lower_rank(problem, Schedule.named("gather_sm"), 0)
    (launch,) = launches_in(plan, DescribedKernels(90, 132), (True,))
    even = variant_of(launch)
    divisors = {each.name: each.divisor for each in passed(even)}
    assert even.aligned and "*bf16[2]" in even.types
    assert {divisors[f"{name}.1"] for name in ("w", "bias", "y", "n", "y_strides")} == {16}
    assert {divisors[name] for name in ("plan.0", "sets.1", "copy")} == {1}
    names = [each.name for each in launch.kernel.parameters]
    divided = source_of(even)[3]
    assert all((names.index(name), i) in divided for name in ("w", "n") for i in range(2))
    assert not any((names.index(name), 0) in divided for name in ("plan", "sets"))
    for name, value in {"n": (64, 60), "w": (launch.arguments["w"][0], Address(8))}.items():
        other = launch._replace(arguments=launch.arguments | {name: value})
        assert not is_aligned(other) and not variant_of(other).aligned, name


@pytest.mark.parametrize("counts", [(3, 0), (8, 8), (12, 12, 0, 12), (1,) * 7 + (0,)])
def test_it_has_the_pooling_of_all_ranks(counts: tuple[int, ...]) -> None:
    """Also of a rank without tables, which only copies what arrives."""
    world = len(counts)
    problem = Problem(
        "embedding_all_to_all", world, (64,) * world, 1, (Output((64,) * world),), "bfloat16",
        tables=tuple((100,) * count for count in counts),
        lookups=tuple((1000,) * count for count in counts),
    )  # fmt: skip
    for rank in range(world):
        plan = lower_rank(problem, Schedule.named("pool_sm"), rank)
        for launch in launches_in(plan, DescribedKernels(90, 132)):
            assert launch.arguments["EDGE"] == 8, f"rank {rank} moves single elements"
            assert pack.has(variant_of(launch), 90), f"rank {rank}"


@pytest.mark.parametrize("op", [op for op in OPERATORS if "whole_sm" in Schedule.names(op)])
@pytest.mark.parametrize("world", [2, 8])
def test_the_pack_has_the_kernels_that_move_rows(op: str, world: int) -> None:
    problem = Problem.chunked(op, world, 64 * world, 512, 512 * world, "bfloat16")
    schedule = Schedule.named("whole_sm").resolve(world, Machine.named("cuda"))
    for rank in range(world):
        plan = lower_rank(problem, schedule, rank)
        launches = list(launches_in(plan, DescribedKernels(90, 132)))
        assert launches
        for launch in launches:
            assert pack.opened(90).has(variant_of(launch)), (rank, launch.arguments["WORLD"])
