"""Building the files of the pack: every variant of the grid is compiled, in parallel.

Kernels whose sources have not changed are taken from the present file. Compiled kernels are kept in
a work folder by source digest and variant, so that a build after an interruption continues.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ficco.cli.packing import grid, ordering
from ficco.core import files
from ficco.core.errors import EngineError
from ficco.kernels import compile_worker, pack, sources
from ficco.kernels.declarations import KERNELS
from ficco.kernels.variants import Variant

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
    are taken from the present file, without .ptx. The order of loads, stores and fences in the PTX
    of the others is checked: see `ordering`.

    Raises:
        EngineError: a process failed, or a kernel is out of order; the message names the variant.
    """
    folder = work / f"{sources.digest()[:16]}-{TRITON}-sm_{capability}"
    files.make_folder(folder)
    places = {variant: folder / variant.key for variant in wanted}
    if reuse:
        taken = _take_unchanged(capability, places)
        say(f"sm_{capability}: {taken} kernels are taken from the present file")
    missing = [v for v, stem in places.items() if not stem.with_suffix(".json").exists()]
    say(f"sm_{capability}: {len(wanted)} kernels, {len(missing)} to be compiled")
    running: list[subprocess.Popen[bytes]] = []
    begun = next_report = time.monotonic()
    command = [sys.executable, "-P", "-m", compile_worker.__name__, str(capability), str(folder)]
    with without_lines():
        for turn in range(min(processes, len(missing))):
            lines = "\n".join(variant.text for variant in missing[::-1][turn::processes])
            settings = os.environ | {"TRITON_INTERPRET": "0"}
            process = subprocess.Popen(command, stdin=subprocess.PIPE, env=settings)
            assert process.stdin is not None
            process.stdin.write(lines.encode())
            process.stdin.close()
            running.append(process)
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
        _check_order(variant, places[variant])
    return places


@contextmanager
def without_lines() -> Iterator[None]:
    """Compile anew, and without the names of source files, which depend on the machine."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_CACHE_DIR": folder}
        before = {name: os.environ.get(name) for name in settings}
        os.environ |= settings
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def _check_order(variant: Variant, stem: Path) -> None:
    """Check the PTX of a variant, and write the digest of the text to its record."""
    text, record = stem.with_suffix(".ptx").read_text(), stem.with_suffix(".json")
    try:
        if variant.kernel in ordering.CHECKS:
            ordering.CHECKS[variant.kernel](text, variant)
    except (AssertionError, ValueError) as wrong:
        raise EngineError(f"out of order: {wrong}; the variant is {variant.text}") from wrong
    digest = hashlib.sha256(text.encode()).hexdigest()
    record.write_text(json.dumps(json.loads(record.read_text()) | {"ptx_sha256": digest}))


def _take_unchanged(capability: int, places: dict[Variant, Path]) -> int:
    """Write the files of variants of unchanged kernels from the present file; return how many."""
    if capability not in pack.capabilities():
        return 0
    old, taken = pack.opened(capability), 0
    if (old.manifest["triton"], old.manifest["format"]) != (TRITON, pack.FORMAT):
        return 0
    before, now = old.manifest.get("kernel_sources", {}), _kernel_sources()
    with pack.keeping_blocks():
        for variant, stem in places.items():
            found = old.find(variant)
            same = before.get(variant.kernel) == now[variant.kernel]
            if found is None or not same or stem.with_suffix(".json").exists():
                continue
            record = dict(old.manifest["kernels"][variant.key])
            for name in ("variant", "cubin", "sha256"):
                del record[name]
            stem.with_suffix(".cubin").write_bytes(found.cubin)
            stem.with_suffix(".json").write_text(json.dumps(record))
            taken += 1
    return taken


def _kernel_sources() -> dict[str, str]:
    """Return the digest of each kernel's sources and of the checks of its order, by its name."""
    checks = sources.code_of(Path(ordering.__file__).read_text(encoding="utf-8"))
    found = {}
    for name, each in KERNELS.items():
        checked = checks if name in ordering.CHECKS else ""
        text = sources.digest_of(each.module, name) + checked
        found[name] = hashlib.sha256(text.encode()).hexdigest()
    return found


def packed(capability: int, places: dict[Variant, Path]) -> bytes:
    """Return the zip of a compute capability's kernels."""
    kernels: dict[str, Any] = {}
    blocks = Blocks("cubin")
    for variant in sorted(places):
        content = places[variant].with_suffix(".cubin").read_bytes()
        kernels[variant.key] = {
            **json.loads(places[variant].with_suffix(".json").read_text()),
            "variant": variant.text,
            "cubin": blocks.add(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    manifest = {
        "format": pack.FORMAT, "capability": capability, "triton": TRITON,
        "sources": sources.digest(), "kernel_sources": _kernel_sources(), "kernels": kernels,
    }  # fmt: skip
    contents = {"manifest.json": json.dumps(manifest, sort_keys=True, indent=0).encode()}
    return zipped(contents | blocks.finished())


class Blocks:
    """Concatenates contents of a kind into blocks, which are compressed as a whole."""

    def __init__(self, kind: str) -> None:
        self._kind, self._blocks = kind, [bytearray()]

    def add(self, content: bytes) -> list[Any]:
        """Add a content; return its block, its offset there, and its size."""
        if len(self._blocks[-1]) + len(content) > _BLOCK_BYTES:
            self._blocks.append(bytearray())
        self._blocks[-1] += content
        size = len(self._blocks[-1])
        return [self._name(len(self._blocks) - 1), size - len(content), len(content)]

    def finished(self) -> dict[str, bytes]:
        """Return all blocks."""
        return {self._name(i): bytes(block) for i, block in enumerate(self._blocks)}

    def _name(self, number: int) -> str:
        return f"{self._kind}-{number:03}"


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

    if not __debug__:
        raise EngineError("python -O leaves out the checks of the order of kernels; run without it")
    if triton.__version__ != TRITON:
        raise EngineError(
            f"the pack needs Triton {TRITON}, but {triton.__version__} is installed; "
            f"pip install triton=={TRITON}"
        )
    places = compile_all(grid.variants(capability), capability, work, processes, say, reuse=True)
    path = pack.FOLDER / f"sm_{capability}.zip"
    files.make_folder(path.parent)
    content = packed(capability, places)
    files.write(path, content, "PK")
    say(f"{path}: {len(content) / 1e6:.1f} MB, {len(places)} kernels")
    return path
