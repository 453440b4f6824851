"""Building the files of the pack: every variant of the grid is compiled, in parallel.

Kernels whose sources have not changed are taken from the present file. Compiled kernels are kept in
a work folder by source digest and variant, so that a build after an interruption continues.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ficco.errors import EngineError
from ficco.kernels import pack, sources
from ficco.kernels.declarations import KERNELS
from ficco.kernels.variants import Variant
from ficco.packing import grid

__all__ = ["TRITON", "Blocks", "compile_all", "packed", "write", "zipped"]

TRITON = "3.6.0"  # the only version that builds the pack
_POLL_S, _REPORT_S = 0.2, 10.0  # intervals of polls of the processes, and of progress reports
_BLOCK_BYTES = 4 << 20  # unpacked size of a block, which is read for one kernel
_ENTRY_TIME = (2020, 1, 1, 0, 0, 0)  # of every entry of the zip
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 8 << 20}]


def compile_all(
    wanted: Sequence[Variant],
    capability: int,
    work: Path,
    processes: int,
    say: Callable[[str], None],
    reuse: bool = False,
) -> dict[Variant, Path]:
    """Compile variants in separate processes; return the stem of each one's files.

    The files are the stem with .cubin, .ptx and .json. With `reuse`, variants of unchanged kernels
    are taken from the present file.

    Raises:
        EngineError: a process failed; the message names the variant.
    """
    folder = work / f"{sources.digest()[:16]}-{TRITON}-sm_{capability}"
    folder.mkdir(parents=True, exist_ok=True)
    places = {variant: folder / variant.key for variant in wanted}
    if reuse:
        taken = _take_unchanged(capability, places)
        say(f"sm_{capability}: {taken} kernels are taken from the present file")
    missing = [v for v, stem in places.items() if not stem.with_suffix(".json").exists()]
    say(f"sm_{capability}: {len(wanted)} kernels, {len(missing)} to be compiled")
    running: list[subprocess.Popen[bytes]] = []
    begun = time.monotonic()
    settings = os.environ | {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_INTERPRET": "0"}
    for turn in range(min(processes, len(missing))):
        lines = "\n".join(variant.text for variant in missing[::-1][turn::processes])
        command = [sys.executable, "-m", "ficco.packing.worker", str(capability), str(folder)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=settings)
        assert process.stdin is not None
        process.stdin.write(lines.encode())
        process.stdin.close()
        running.append(process)
    next_report = begun
    while any(process.poll() is None for process in running):
        time.sleep(_POLL_S)
        if time.monotonic() > next_report:
            next_report += _REPORT_S
            done = sum(places[v].with_suffix(".json").exists() for v in missing)
            say(f"sm_{capability}: {done} of {len(missing)}, {time.monotonic() - begun:.0f} s")
    if any(process.returncode for process in running):
        raise EngineError("compiling the pack failed; see the errors above")
    for variant in missing:
        error = places[variant].with_suffix(".error")
        if error.exists():
            raise EngineError(f"{error.read_text()}; the variant is {variant.text}")
    return places


def _take_unchanged(capability: int, places: dict[Variant, Path]) -> int:
    """Write the files of variants of unchanged kernels from the present file; return how many."""
    if capability not in pack.capabilities():
        return 0
    old, taken = pack.opened(capability), 0
    before = old.manifest.get("kernel_sources", {}) if old.manifest["triton"] == TRITON else {}
    now = _kernel_sources()
    with pack.keeping_blocks():
        for variant, stem in places.items():
            found = old.find(variant)
            same = before.get(variant.kernel) == now[variant.kernel]
            if found is None or not same or stem.with_suffix(".json").exists():
                continue
            record = dict(old.manifest["kernels"][variant.key])
            for name in ("variant", "cubin", "ptx"):
                del record[name]
            stem.with_suffix(".cubin").write_bytes(found.cubin)
            stem.with_suffix(".ptx").write_text(old.ptx(variant) or "")
            stem.with_suffix(".json").write_text(json.dumps(record))
            taken += 1
    return taken


def _kernel_sources() -> dict[str, str]:
    """Return the digest of each kernel's sources, by its name."""
    return {name: sources.digest_of(each.module, name) for name, each in KERNELS.items()}


def packed(capability: int, places: dict[Variant, Path]) -> bytes:
    """Return the zip of a compute capability's kernels."""
    kernels: dict[str, Any] = {}
    blocks = Blocks()
    for kind in ("cubin", "ptx"):
        for variant in sorted(places):
            place = blocks.add(kind, places[variant].with_suffix(f".{kind}").read_bytes())
            record = kernels.setdefault(variant.key, {"variant": variant.text})
            record |= json.loads(places[variant].with_suffix(".json").read_text())
            record[kind] = place
    manifest = {
        "format": pack.FORMAT, "capability": capability, "triton": TRITON,
        "sources": sources.digest(), "kernel_sources": _kernel_sources(), "kernels": kernels,
    }  # fmt: skip
    contents = {"manifest.json": json.dumps(manifest, sort_keys=True, indent=0).encode()}
    return zipped(contents | blocks.finished())


class Blocks:
    """Concatenates contents into blocks, which are compressed as a whole."""

    def __init__(self) -> None:
        self._blocks: dict[str, bytearray] = {}
        self._last: dict[str, str] = {}

    def add(self, kind: str, content: bytes) -> list[Any]:
        """Add a content; return its block, its offset there, and its size."""
        name = self._last.get(kind)
        if name is None or len(self._blocks[name]) + len(content) > _BLOCK_BYTES:
            name = self._last[kind] = f"{kind}-{len(self._blocks):03}"
            self._blocks[name] = bytearray()
        block = self._blocks[name]
        block += content
        return [name, len(block) - len(content), len(content)]

    def finished(self) -> dict[str, bytes]:
        """Return all blocks."""
        return {name: bytes(block) for name, block in self._blocks.items()}


def zipped(contents: dict[str, bytes]) -> bytes:
    """Return a reproducible zip of entries that are compressed by xz."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_STORED) as file:
        for name, content in sorted(contents.items()):
            entry = zipfile.ZipInfo(f"{name}.xz", _ENTRY_TIME)
            data = lzma.compress(content, lzma.FORMAT_XZ, lzma.CHECK_CRC32, filters=_FILTERS)
            file.writestr(entry, data)
    return memory.getvalue()


def write(capability: int, work: Path, processes: int, say: Callable[[str], None]) -> Path:
    """Build the file of a compute capability and return its path.

    Raises:
        EngineError: the installed Triton is another version, or compilation failed.
    """
    import triton

    if triton.__version__ != TRITON:
        raise EngineError(
            f"the pack needs Triton {TRITON}, but {triton.__version__} is installed; "
            f"pip install triton=={TRITON}"
        )
    places = compile_all(grid.variants(capability), capability, work, processes, say, reuse=True)
    path = pack.FOLDER / f"sm_{capability}.zip"
    path.parent.mkdir(exist_ok=True)
    content = packed(capability, places)
    path.write_bytes(content)
    say(f"{path}: {len(content) / 1e6:.1f} MB, {len(places)} kernels")
    return path
