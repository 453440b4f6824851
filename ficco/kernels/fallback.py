"""Compiling what the pack lacks, by the Triton that is installed, in processes of their own.

Several variants are compiled at once. Triton keeps them in its cache on disk, so that the next
process of the user finds them there. Nothing here imports Triton.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from ficco.errors import EngineError
from ficco.kernels import pack
from ficco.kernels.variants import Variant

__all__ = ["ByTriton", "compile_together", "find", "why_not"]

_log = logging.getLogger("ficco")
_FIRST_WORD_S, _NEXT_WORD_S, _LOOK_S = 2.0, 10.0, 0.05  # when progress is told, and looked at
_MOST_PROCESSES = 16
_lock = threading.Lock()
_compiled: dict[tuple[int, Variant], pack.Found | str] = {}  # or why native code cannot launch it


class ByTriton(EngineError):
    """A kernel that only Triton can launch; says why."""


def why_not() -> str:
    """Say why nothing can be compiled; "": it can."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    return ""


def find(variant: Variant, capability: int) -> pack.Found:
    """Return a variant, compiled.

    Raises:
        ByTriton: native code cannot launch what Triton makes of it.
        EngineError: it cannot be compiled.
    """
    compile_together([variant], capability)
    found = _compiled[capability, variant]
    if isinstance(found, str):
        raise ByTriton(found)
    return found


def compile_together(variants: Iterable[Variant], capability: int) -> None:
    """Compile variants that are neither in the pack nor compiled, several at a time.

    What takes more than some seconds is told, by warnings of the logger "ficco".

    Raises:
        EngineError: they cannot be compiled; says what the pack lacks, and what to do.
    """
    with _lock:
        missing = [
            each
            for each in dict.fromkeys(variants)
            if (capability, each) not in _compiled and not pack.has(each, capability)
        ]
        if missing:
            _compile(missing, capability)


def _compile(missing: list[Variant], capability: int) -> None:
    lacks = f"kernels for sm_{capability} are not in the pack ({_names(missing)})"
    unused = pack.why_not(capability)
    if unused:
        lacks = f"kernels for sm_{capability} are wanted, and {unused}"
    reason = why_not()
    if reason:
        raise EngineError(
            f"{lacks}; they cannot be compiled, for {reason.lower()}; pip install triton, or use "
            "another schedule"
        )
    with tempfile.TemporaryDirectory(prefix="ficco-") as folder:
        _run(missing, capability, Path(folder), lacks)
        for each in missing:
            _compiled[capability, each] = _result(Path(folder) / each.key)


def _run(missing: list[Variant], capability: int, folder: Path, lacks: str) -> None:
    """Run processes that compile, and tell of progress.

    Raises:
        EngineError: one of them failed.
    """
    count = min(len(missing), os.cpu_count() or 1, _MOST_PROCESSES)
    command = [sys.executable, "-m", "ficco.kernels.compile_worker", str(capability), str(folder)]
    settings = os.environ | {"TRITON_INTERPRET": "0"}
    running: list[tuple[subprocess.Popen[bytes], Path]] = []
    for turn in range(count):
        said = folder / f"worker-{turn}.log"
        with said.open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=settings
            )
        assert process.stdin is not None
        process.stdin.write("\n".join(each.text for each in missing[turn::count]).encode())
        process.stdin.close()
        running.append((process, said))
    begun = time.monotonic()
    next_word = begun + _FIRST_WORD_S
    while any(process.poll() is None for process, _ in running):
        time.sleep(_LOOK_S)
        if time.monotonic() > next_word:
            next_word = time.monotonic() + _NEXT_WORD_S
            done = sum(1 for each in folder.iterdir() if each.suffix in (".json", ".error"))
            _log.warning(
                "%s; %d of %d are compiled by Triton, after %.0f s, in %d processes",
                lacks, done, len(missing), time.monotonic() - begun, count,
            )  # fmt: skip
    for process, said in running:
        if process.returncode:
            text = said.read_text(errors="replace").strip()[-2000:]
            raise EngineError(f"{lacks}; Triton failed to compile one of them:\n{text}")
    level = logging.INFO if _compiled else logging.WARNING  # a warning once
    _log.log(level, "%s; Triton compiled them in %.1f s", lacks, time.monotonic() - begun)


def _result(stem: Path) -> pack.Found | str:
    if not stem.with_suffix(".json").exists():
        return stem.with_suffix(".error").read_text()
    record = json.loads(stem.with_suffix(".json").read_text())
    return pack.Found(stem.with_suffix(".cubin").read_bytes(), record)


def _names(variants: list[Variant]) -> str:
    counts: dict[str, int] = {}
    for each in variants:
        counts[each.kernel] = counts.get(each.kernel, 0) + 1
    return ", ".join(f"{count} of {name}" for name, count in counts.items())
