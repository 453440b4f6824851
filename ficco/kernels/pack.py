"""Reading the pack: kernels that were compiled ahead of time, in packs/. No Triton.

`ficco.packing` builds one file per compute capability: a zip of a manifest and of blocks, each with
several cubins. A block is unpacked when the first of its kernels is requested.
"""

from __future__ import annotations

import contextlib
import functools
import json
import lzma
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ficco.call_lock import CallLock
from ficco.kernels import sources
from ficco.kernels.variants import Variant
from ficco.settings import switch

__all__ = ["FOLDER", "FORMAT", "Found", "Pack", "capabilities", "find", "has", "keeping_blocks",
           "opened", "why_not"]  # fmt: skip

FOLDER = Path(__file__).with_name("packs")
FORMAT = 1
# Compute capabilities whose kernels have never run; a pack for them is used only if this is "1".
UNTRIED, ALLOWED_BY = (100,), "FICCO_SM100"
_SWITCH = "FICCO_PACK"  # "0": the pack is not used
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
    """

    def __init__(self, path: Path) -> None:
        self._file = zipfile.ZipFile(path)
        self._blocks: dict[str, bytes] = {}  # in order of use, the most recent last
        self._lock = CallLock()
        self.manifest: dict[str, Any] = json.loads(self._read("manifest.json"))

    def find(self, variant: Variant) -> Found | None:
        """Return a variant, or None if the pack lacks it."""
        record = self._record(variant)
        return None if record is None else Found(self._bytes(record["cubin"]), record)

    def has(self, variant: Variant) -> bool:
        """Return whether the pack has a variant; unpack nothing."""
        return self._record(variant) is not None

    def _record(self, variant: Variant) -> dict[str, Any] | None:
        record: dict[str, Any] | None = self.manifest["kernels"].get(variant.key)
        return None if record is None or record["variant"] != variant.text else record

    def ptx(self, variant: Variant) -> str | None:
        """Return the PTX text of a variant, or None if the pack lacks it."""
        record = self.manifest["kernels"].get(variant.key)
        if record is None or "ptx" not in record:
            return None
        return self._bytes(record["ptx"]).decode()

    def _bytes(self, place: list[Any]) -> bytes:
        block, begin, size = place
        return self._block(block)[begin : begin + size]

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
        return lzma.decompress(self._file.read(f"{name}.xz"))


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
        InputError: FICCO_PACK or FICCO_SM100 is neither 0 nor 1.
    """
    if not switch(_SWITCH, True):
        return f"{_SWITCH}=0 is set"
    if capability in UNTRIED and not switch(ALLOWED_BY, False):
        return (
            f"kernels for sm_{capability} are in the pack, but have never run on such a GPU; set "
            f"{ALLOWED_BY}=1 to use them"
        )
    return _why_unusable(capability)


@functools.cache
def _why_unusable(capability: int) -> str:
    if not (FOLDER / f"sm_{capability}.zip").exists():
        return f"there is no pack of kernels for sm_{capability}"
    manifest = opened(capability).manifest
    if manifest["format"] != FORMAT:
        return f"the pack for sm_{capability} has format {manifest['format']}, not {FORMAT}"
    if manifest["sources"] != sources.digest():
        return (
            f"the pack for sm_{capability} was built from other kernel sources; rebuild it with "
            "python -m ficco.packing"
        )
    return ""


def find(variant: Variant, capability: int) -> Found | None:
    """Return a variant from the pack; None if the pack lacks it or is not used (`why_not`)."""
    return None if why_not(capability) else opened(capability).find(variant)


def has(variant: Variant, capability: int) -> bool:
    """Return whether `find` would return a variant; unpack nothing."""
    return not why_not(capability) and opened(capability).has(variant)
