"""Names that were given up do not come back: modules, and identifiers of Python and C++."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = """
    posing verifier/contents verifier/words lowering/direct lowering/direct_gather
    lowering/one_launch lowering/blocks engines/standing engines/cuda_layout engines/cuda_windows
    engines/shared engines/room engines/one_launch kernels/landed_sum kernels/leaving
    kernels/leaving_kernel kernels/releasing kernels/acquiring kernels/many_words kernels/mailing
    kernels/sharing kernels/launching kernels/one_launch kernels/direct kernels/direct_gather
    kernels/direct_gather_kernel kernels/direct_gather_table kernels/direct_handshake
    kernels/direct_kernel kernels/direct_product kernels/direct_table kernels/parts kernels/tables
    kernels/gated_kernel kernels/pushing_kernel kernels/summing_kernel runtime/meeting
    runtime/connecting runtime/process_cuda runtime/local_cuda runtime/blas runtime/exchanging
    modules/again modules/library modules/gradients modules/measuring modules/blame
    modules/layers/trial profiling/calling profiling/tallies profiling/gpu/beside
    profiling/gpu/landing profiling/gpu/storing profiling/gpu/hosting profiling/gpu/words
    profiling/host/words sweeping/gpu/todo sweeping/gpu/measure cli/choosing cli/meeting_folder
    cli/working grouping engines/rows engines/gating engines/work engines/one_kernel
    kernels/tiling kernels/plan_reader kernels/gated_parts kernels/one_kernel_all_reduce_table
    kernels/one_kernel_gather_table modules/plain modules/ranks runtime/collectives
    sweeping/gpu/timing sweeping/gpu/joining sweeping/gpu/measuring sweeping/gpu/operands
    sweeping/gpu/pieces sweeping/gpu/layout sweeping/gpu/launching
""".split()  # noqa: SIM905 - as a list it is a page
IDENTIFIERS = set(
    """
    word_place word_at Leaving LeavingTable leaving_table Landed landing landing_rows
    landing_stride Room room_of Standing standing call_again can_call_again spoil spoilt
    DirectOperands DirectOutput DirectWindows DirectTable DirectTile DirectChunk direct_gather
    direct_all_reduce arm_direct prepare_direct described_direct Meeting MeetingFolder
    meeting_folder posing GpuWays kTold told_word BoundPlan
    BoundPlans stores_of steps_within calls_of encode_whole kFewestStored
    """.split()  # noqa: SIM905
)


def python_names(path: Path) -> Iterator[str]:
    """Yield the identifiers of a Python file, and keywords of calls."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.NAME:
            yield token.string


def native_names(path: Path) -> Iterator[str]:
    """Yield the words of a C++ file outside of comments and texts."""
    text = re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"', " ", path.read_text(), flags=re.DOTALL)
    yield from re.findall(r"[A-Za-z_]\w*", text)


@pytest.mark.parametrize("folder", ["ficco", "tests", "bench", "native"])
def test_no_retired_identifier_is_used(folder: str) -> None:
    used = set()
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix in (".py", ".pyi"):
            names = python_names(path)
        elif path.suffix in (".cpp", ".hpp"):
            names = native_names(path)
        else:
            continue
        used |= {(str(path.relative_to(ROOT)), name) for name in names if name in IDENTIFIERS}
    assert not used


def test_no_retired_module_exists() -> None:
    assert not [name for name in MODULES if (ROOT / "ficco" / f"{name}.py").exists()]


def test_names_are_read_from_code_alone(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('# Room\nx = Leaving("spoil")  # told\n')
    assert set(python_names(tmp_path / "a.py")) & IDENTIFIERS == {"Leaving"}
    (tmp_path / "a.cpp").write_text(
        '// Room\nint landing = f("spoil"); /* Meeting\n*/ GpuWays w;\n'
    )
    assert set(native_names(tmp_path / "a.cpp")) & IDENTIFIERS == {"landing", "GpuWays"}
