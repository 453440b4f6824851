"""Compiling kernels that the pack lacks, by the installed Triton, in separate processes.

Several variants are compiled in parallel. Triton keeps them in its disk cache for the user's later
processes. Nothing here imports Triton.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from ficco.core.call_lock import CallLock
from ficco.core.errors import EngineError
from ficco.kernels import pack
from ficco.kernels.variants import Variant

_log = logging.getLogger("ficco")
_FIRST_REPORT_S, _NEXT_REPORT_S, _POLL_S = 2.0, 10.0, 0.05  # progress reports, and polls
_MOST_PROCESSES = 16
_lock = CallLock()
_compiled: dict[tuple[int, Variant], pack.Found | str] = {}  # str: why native code cannot launch


class ByTriton(EngineError):
    """A kernel that only Triton can launch; the message says why."""


def why_not() -> str:
    """Return why nothing can be compiled, or "" if it can."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    return ""


def find(variant: Variant, capability: int) -> pack.Found:
    """Return a compiled variant.

    Raises:
        ByTriton: native code cannot launch the compiled kernel.
        EngineError: the variant cannot be compiled.
    """
    compile_together([variant], capability)
    compiled = _compiled[capability, variant]
    if isinstance(compiled, str):
        raise ByTriton(compiled)
    return compiled


def compile_together(variants: Iterable[Variant], capability: int) -> None:
    """Compile variants that are neither in the pack nor compiled, several at a time.

    The logger "ficco" warns of progress if compilation takes more than a few seconds.

    Raises:
        EngineError: compilation failed; the message says what the pack lacks and what to do.
    """
    with _lock():
        missing = [
            variant
            for variant in dict.fromkeys(variants)
            if (capability, variant) not in _compiled and not pack.has(variant, capability)
        ]
        if missing:
            _compile(missing, capability)


def _compile(missing: list[Variant], capability: int) -> None:
    lacks = f"kernels for sm_{capability} are not in the pack ({_names(missing)})"
    unused = pack.why_not(capability)
    if unused:
        lacks = f"kernels for sm_{capability} are needed, and {unused}"
    reason = why_not()
    if reason:
        raise EngineError(
            f"{lacks}; they cannot be compiled because {reason}; pip install triton, or use "
            "another schedule"
        )
    with tempfile.TemporaryDirectory(prefix="ficco-") as folder:
        _run(missing, capability, Path(folder), lacks)
        for variant in missing:
            _compiled[capability, variant] = _result(Path(folder) / variant.key)


def _run(missing: list[Variant], capability: int, folder: Path, lacks: str) -> None:
    """Run processes that compile, and report progress.

    Raises:
        EngineError: a process failed.
    """
    count = min(len(missing), os.cpu_count() or 1, _MOST_PROCESSES)
    worker = ("-P", "-m", "ficco.kernels.compile_worker")  # -P: not of the current folder
    command = [sys.executable, *worker, str(capability), str(folder)]
    settings = os.environ | {"TRITON_INTERPRET": "0"}
    running: list[tuple[subprocess.Popen[bytes], Path]] = []
    for turn in range(count):
        log_path = folder / f"worker-{turn}.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=settings
            )
        assert process.stdin is not None
        process.stdin.write("\n".join(variant.text for variant in missing[turn::count]).encode())
        process.stdin.close()
        running.append((process, log_path))
    begun = time.monotonic()
    next_report = begun + _FIRST_REPORT_S
    while any(process.poll() is None for process, _ in running):
        time.sleep(_POLL_S)
        if time.monotonic() > next_report:
            next_report = time.monotonic() + _NEXT_REPORT_S
            done = sum(1 for path in folder.iterdir() if path.suffix in (".json", ".error"))
            _log.warning(
                "%s; %d of %d are compiled by Triton, after %.0f s, in %d processes",
                lacks, done, len(missing), time.monotonic() - begun, count,
            )  # fmt: skip
    for process, log_path in running:
        if process.returncode:
            text = log_path.read_text(errors="replace").strip()[-2000:]
            raise EngineError(f"{lacks}; Triton failed to compile one of them:\n{text}")
    level = logging.INFO if _compiled else logging.WARNING  # warn only the first time
    _log.log(level, "%s; Triton compiled them in %.1f s", lacks, time.monotonic() - begun)


def _result(stem: Path) -> pack.Found | str:
    if not stem.with_suffix(".json").exists():
        return stem.with_suffix(".error").read_text()
    record = json.loads(stem.with_suffix(".json").read_text())
    return pack.Found(stem.with_suffix(".cubin").read_bytes(), record)


def _names(variants: list[Variant]) -> str:
    counts: dict[str, int] = {}
    for variant in variants:
        counts[variant.kernel] = counts.get(variant.kernel, 0) + 1
    return ", ".join(f"{count} of {name}" for name, count in counts.items())
