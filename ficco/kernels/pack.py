"""Reading the pack: kernels that were compiled ahead of time, in packs/. No Triton.

`ficco.cli.packing` builds one file per compute capability: a zip of a manifest and of blocks, each
with several cubins. A block is unpacked when the first of its kernels is requested. The record of a
kernel has the SHA-256 of its cubin, which is compared when the kernel is loaded.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import lzma
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ficco.core import files
from ficco.core.call_lock import CallLock
from ficco.core.errors import EngineError
from ficco.core.interrupts import is_interrupt
from ficco.core.reading import parsed_json
from ficco.core.settings import switch
from ficco.kernels import sources
from ficco.kernels.variants import Variant

FOLDER = Path(__file__).with_name("packs")
FORMAT = 2
_SWITCH = "FICCO_PACK"  # "0": the pack is not used
_MOST_UNPACKED = 256 << 20  # bytes of a block or a manifest
_FEW_BLOCKS = 4  # unpacked blocks to keep, of 4 MiB each; `keeping_blocks` keeps all


class Found(NamedTuple):
    """A compiled kernel.

    Attributes:
        cubin: the binary that the driver loads.
        record: see `compiling.Compiled`.
    """

    cubin: bytes
    record: dict[str, Any]


class Pack:
    """The pack of one compute capability.

    Attributes:
        manifest: the pack's description; "kernels" are by `Variant.key`.

    Raises:
        EngineError: the file is damaged. Methods raise it, too.
        FileNotFoundError: there is no file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._blocks: dict[str, bytes] = {}  # in order of use, the most recent last
        self._lock = CallLock()
        with self._reading():
            self._file = zipfile.ZipFile(files.open_regular(path))
            self.manifest: dict[str, Any] = parsed_json(self._read("manifest.json"), "manifest")
            self.manifest["kernels"].keys()

    def find(self, variant: Variant) -> Found | None:
        """Return a variant, or None if the pack lacks it."""
        record = self._record(variant)
        if record is None:
            return None
        with self._reading():
            cubin, digest = self._bytes(record["cubin"]), record["sha256"]
        if hashlib.sha256(cubin).hexdigest() != digest:
            raise EngineError(
                f"{self._path} is damaged: {variant.kernel} does not have the SHA-256 of its "
                "record; install ficco again"
            )
        return Found(cubin, record)

    def has(self, variant: Variant) -> bool:
        """Return whether the pack has a variant; unpack nothing."""
        return self._record(variant) is not None

    def _record(self, variant: Variant) -> dict[str, Any] | None:
        with self._reading():
            record: dict[str, Any] | None = self.manifest["kernels"].get(variant.key)
            return None if record is None or record["variant"] != variant.text else record

    def _bytes(self, place: list[Any]) -> bytes:
        block, begin, size = place
        return self._block(block)[begin : begin + size]

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn what a damaged file raises into an EngineError."""
        try:
            yield
        except (FileNotFoundError, MemoryError, EngineError):
            raise
        except Exception as wrong:  # the libraries raise a dozen kinds for a damaged file
            if is_interrupt(wrong):
                raise
            reason = f"{type(wrong).__name__}: {wrong}"
            raise EngineError(f"{self._path} is damaged ({reason}); install ficco again") from wrong

    def _block(self, name: str) -> bytes:
        with self._lock():
            block = self._blocks.pop(name, None)
            self._blocks[name] = block = self._read(name) if block is None else block
            if not _keepers:
                self._drop()
            return block

    def drop_blocks(self) -> None:
        """Drop all unpacked blocks except for a few recently used ones."""
        with self._lock():
            self._drop()

    def _drop(self) -> None:
        for name in list(self._blocks)[:-_FEW_BLOCKS]:
            del self._blocks[name]

    def _read(self, name: str) -> bytes:
        with self._reading():
            unpack = lzma.LZMADecompressor(lzma.FORMAT_XZ)
            data = unpack.decompress(self._file.read(f"{name}.xz"), _MOST_UNPACKED)
            if not unpack.eof:
                raise EOFError(f"{name} is cut off, or too large")
            return data


_keepers: list[None] = []  # one per active `keeping_blocks`


@contextlib.contextmanager
def keeping_blocks() -> Iterator[None]:
    """Keep all blocks that are unpacked inside the block, for kernels of several blocks."""
    _keepers.append(None)
    try:
        yield
    finally:
        _keepers.pop()
        for pack in list(_opened.values()):
            pack.drop_blocks()


def capabilities() -> list[int]:
    """Return the compute capabilities that have a pack."""
    return sorted(int(path.stem.removeprefix("sm_")) for path in FOLDER.glob("sm_*.zip"))


_opened: dict[int, Pack] = {}


def opened(capability: int) -> Pack:
    """Return the pack of a compute capability, even if it is not to be used.

    Raises:
        FileNotFoundError: there is no pack.
    """
    if capability not in _opened:
        _opened[capability] = Pack(FOLDER / f"sm_{capability}.zip")
    return _opened[capability]


def why_not(capability: int) -> str:
    """Return why the pack is not used on a device of this compute capability, or "" if it is.

    Raises:
        InputError: FICCO_PACK is neither 0 nor 1.
    """
    if not switch(_SWITCH, True):
        return f"{_SWITCH}=0 is set"
    return _why_unusable(capability)


@functools.cache
def _why_unusable(capability: int) -> str:
    if not (FOLDER / f"sm_{capability}.zip").exists():
        return f"there is no pack of kernels for sm_{capability}"
    try:
        manifest = opened(capability).manifest
    except EngineError as damaged:
        return str(damaged)
    if manifest["format"] != FORMAT:
        return f"the pack for sm_{capability} has format {manifest['format']}, not {FORMAT}"
    if manifest["sources"] != sources.digest():
        return (
            f"the pack for sm_{capability} was built from other kernel sources; rebuild it with "
            "python -m ficco.cli.packing"
        )
    return ""


def find(variant: Variant, capability: int) -> Found | None:
    """Return a variant from the pack; None if the pack lacks it or is not used (`why_not`)."""
    return None if why_not(capability) else opened(capability).find(variant)


def has(variant: Variant, capability: int) -> bool:
    """Return whether `find` would return a variant; unpack nothing."""
    return not why_not(capability) and opened(capability).has(variant)
