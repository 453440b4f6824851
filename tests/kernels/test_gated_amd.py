"""The gated GEMM for AMD's devices: in Triton's interpreter, in the package, its instructions."""

from __future__ import annotations

import re
from pathlib import Path

import amd_instructions as isa
import pytest
from test_gated import run_worker

from ficco.cli.packing import amd, building
from ficco.core.errors import EngineError
from ficco.kernels import gated_amd
from ficco.kernels.amd_code import ARCHITECTURES, gated_pack
from ficco.kernels.amd_declarations import AMD_KERNELS
from ficco.kernels.loading import code_of
from ficco.kernels.variants import variant_of
from ficco.program.tiling import Tile


@pytest.mark.parametrize(
    "subject", ["products", "giving_up", "limit", "late", "stopped", "refusals"]
)
def test_it_is_right(subject: str, tmp_path: Path, torch: object) -> None:
    run_worker(subject, tmp_path, "1", "gated_amd")


@pytest.fixture(params=ARCHITECTURES)
def arch(request: pytest.FixtureRequest) -> str:
    triton = pytest.importorskip("triton")
    if triton.__version__ != building.TRITON:
        pytest.skip(f"the package's code is compiled by Triton {building.TRITON}")
    return str(request.param)


def test_the_package_has_what_the_sources_give_and_it_acquires_and_fits(arch: str) -> None:
    pack = gated_pack(arch)
    assert pack.manifest["arch"] == arch and pack.manifest["triton"] == building.TRITON
    variants = [variant_of(launch) for launch in amd.gated_launches()]
    assert pack.manifest["kernels"].keys() == {variant.key for variant in variants}
    for variant in variants:
        kernel, found = amd.compiled_gated(variant, arch), pack.find(variant)
        assert found is not None, variant.text
        assert found.cubin == kernel.asm["hsaco"], "run python -m ficco.cli.packing --amd"
        code = code_of(variant, found.record)
        assert code.name == kernel.metadata.name and code.shared_bytes == kernel.metadata.shared
        assert code.threads == 64 * variant.warps and not kernel.metadata.profile_scratch_size
        try:
            isa.check(kernel.asm["amdgcn"], variant, code.shared_bytes)
        except AssertionError as error:
            raise AssertionError(f"{arch} {variant.text}: {error}") from error


def test_what_is_wrong_is_seen(arch: str) -> None:
    """Instructions that are missing, rows that are read too early, spills."""
    variant = variant_of(next(amd.gated_launches()))
    kernel = amd.compiled_gated(variant, arch)
    text, shared = kernel.asm["amdgcn"], kernel.metadata.shared
    row = re.findall(r"global_load_dwordx4 .*", text)[0]
    isa.check(text, variant, shared)
    for pattern, other, seen in (
        (isa.INVALIDATE, "", "one acquire"),
        (isa.MET, "", "all wavefronts wait"),
        (r"(global_load_dword .*) sc0 sc1", r"\1", "too early"),
        (r"s_waitcnt vmcnt\(0\)", "", "waits for its word"),
        (r"s_waitcnt lgkmcnt\(0\)", "", "has not arrived"),
        (r"v_mfma_f32_16x16", "v_fma_f32", "no matrix instruction"),
        (r"^", f"{row}\n", "too early"),
        (r"(sgpr_spill_count: +)0", r"\g<1>1", "sgpr_spill"),
        (r"(vgpr_count: +)\d+", r"\g<1>264", "registers"),
        (r"tg_split 0", "tg_split 1", "share a cache"),
    ):
        changed, count = re.subn(pattern, other, text)
        assert count, pattern
        with pytest.raises(AssertionError, match=seen):
            isa.check(changed, variant, shared)
    with pytest.raises(AssertionError, match="local memory"):
        isa.check(text, variant, isa.LDS_BYTES + 1)


def test_declarations_are_those_of_the_functions() -> None:
    pytest.importorskip("triton")
    from ficco.kernels.compiling import function_of

    for kernel in AMD_KERNELS.values():
        function = function_of(kernel)
        names = [(each.name, each.is_constexpr) for each in function.params]
        assert names == [(each.name, each.kind == "=") for each in kernel.parameters], kernel.name
        for each, said in zip(function.params, kernel.parameters, strict=True):
            assert each.do_not_specialize == said.unknown, f"{kernel.name}: {each.name}"
            if said.kind in ("i32", "i64"):
                assert each.annotation_type == said.kind, f"{kernel.name}: {each.name}"


def test_all_tiles_have_the_same_table() -> None:
    tiles = {
        gated_amd.tile_of(item, turned, aligned)
        for item in (2, 4) for turned in (0, 1, 2) for aligned in (True, False)
    }  # fmt: skip
    assert len(tiles) > 1 and len({(tile.rows, tile.cols, tile.group) for tile in tiles}) == 1
    assert all(isinstance(tile, Tile) and 64 * tile.warps <= 512 for tile in tiles)


def test_other_architectures_are_refused() -> None:
    with pytest.raises(EngineError, match=r"no code for gfx90a.*gfx942 and gfx950"):
        gated_pack("gfx90a")
