"""The kernel by which AMD's devices wait: what is in the package, and its instructions."""

from __future__ import annotations

import re

import pytest

from ficco.errors import EngineError
from ficco.kernels.amd_code import ARCHITECTURES, AWAIT_ENTRY, AWAIT_SHARED_BYTES, await_code
from ficco.packing import amd, building


@pytest.fixture(scope="module", params=ARCHITECTURES)
def compiled(request: pytest.FixtureRequest) -> tuple[str, object]:
    triton = pytest.importorskip("triton")
    if triton.__version__ != building.TRITON:
        pytest.skip(f"the package's code is compiled by Triton {building.TRITON}")
    return request.param, amd.compiled(request.param)


def test_the_package_has_what_the_source_gives(compiled: tuple[str, object]) -> None:
    arch, kernel = compiled
    assert await_code(arch) == kernel.asm["hsaco"], "run python -m ficco.packing --amd"  # type: ignore[attr-defined]
    assert kernel.metadata.shared == AWAIT_SHARED_BYTES  # type: ignore[attr-defined]
    assert kernel.metadata.name == AWAIT_ENTRY  # type: ignore[attr-defined]


def test_it_acquires_at_system_scope_and_keeps_its_values(compiled: tuple[str, object]) -> None:
    """In the loop each word is read past the caches, which then drop what they hold."""
    text = compiled[1].asm["amdgcn"]  # type: ignore[attr-defined]
    lines = [line.split(";")[0].strip() for line in text.splitlines()]
    reads = [
        i for i, line in enumerate(lines) if re.match(r"(global|flat)_load_dword .* sc0 sc1", line)
    ]
    assert len(reads) == 2, "of the words, and of the stop word"
    after = lines[reads[0] : reads[0] + 12]
    assert "buffer_inv sc0 sc1" in after, "the acquire"
    wait = next(i for i, line in enumerate(after) if line.startswith("s_waitcnt vmcnt(0)"))
    assert wait < after.index("buffer_inv sc0 sc1"), "after the read has ended"
    assert "buffer_wbl2 sc0 sc1" in lines, "the release of the lane's word"
    assert sum("s_memrealtime" in line for line in lines) == 2, "the constant clock bounds the wait"
    assert ".vgpr_spill_count: 0" in re.sub(r" +", " ", text)


def test_other_architectures_are_refused() -> None:
    with pytest.raises(EngineError, match=r"no code for gfx90a.*gfx942 and gfx950"):
        await_code("gfx90a")
