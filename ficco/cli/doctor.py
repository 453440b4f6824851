"""`ficco doctor`: what this machine offers, and what is missing for what."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import platform
from typing import Any, NamedTuple

from ficco.errors import EngineError

__all__ = ["add_to"]


class Finding(NamedTuple):
    """One thing that was looked for."""

    name: str
    ok: bool
    found: str
    serves: str
    do: str = ""


def add_to(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "doctor", help="what this machine offers, and what is missing for what",
        description="Look at this machine. Exit 0 when ficco can run here at all, else 1.",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, nothing else")
    parser.set_defaults(main=_main)


def _main(args: argparse.Namespace) -> int:
    findings = [_platform(), _native(), _memory(), _numpy(), _torch(), _cuda(), _hip()]
    usable = all(f.ok for f in findings if f.serves.startswith("everything"))
    if args.json:
        print(json.dumps({"ok": usable, "findings": [f._asdict() for f in findings]}))
        return 0 if usable else 1
    from rich.table import Table

    from ficco.report.tables import drawn

    table = Table(box=None, pad_edge=False)
    for name in ("", "what", "found", "serves", "to do"):
        table.add_column(name, overflow="fold")
    for f in findings:
        table.add_row("yes" if f.ok else "no", f.name, f.found, f.serves, f.do)
    print(drawn(table))
    return 0 if usable else 1


def _platform() -> Finding:
    system, arch = platform.system(), platform.machine()
    ok = system == "Linux" and arch in ("x86_64", "aarch64")
    found = f"{system} {arch}, Python {platform.python_version()}, {os.cpu_count()} cores"
    return Finding("platform", ok, found, "everything", "" if ok else "use Linux, x86-64 or arm64")


def _native() -> Finding:
    try:
        from ficco.engines import host
    except EngineError as error:
        return Finding("native core", False, str(error), "everything: the host engine's lanes",
                       "install ficco again, with a C++20 compiler at hand")  # fmt: skip
    found = f"threads as copy engines, {host.MOST_LANES} lanes a rank"
    return Finding("native core", True, found, "everything: the host engine's lanes")


def _memory() -> Finding:
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return Finding("memory", True, "unknown", "windows")
    return Finding("memory", True, f"{free / 2**30:.1f} GiB free", "windows")


def _numpy() -> Finding:
    import numpy as np
    from threadpoolctl import threadpool_info

    blas = [
        f"{pool.get('internal_api')} {pool.get('version')}, {pool.get('num_threads')} threads"
        for pool in threadpool_info()
        if pool.get("user_api") == "blas"
    ]
    found = f"NumPy {np.__version__}; BLAS: {'; '.join(blas) or 'not recognized'}"
    return Finding("numpy", True, found, "everything: GEMMs of the host engine")


def _torch() -> Finding:
    serves = "torch tensors, a process per rank, compute='torch'"
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", False, "not installed", serves, "pip install 'ficco[torch]'")
    version = importlib.metadata.version("torch")
    return Finding("torch", True, f"torch {version}", serves)


def _cuda() -> Finding:
    count = _devices("libcuda.so.1", "cuInit", "cuDeviceGetCount")
    serves = "GPUs of NVIDIA: this version of ficco does not run on them yet"
    return Finding("CUDA driver", isinstance(count, int) and count > 0, _described(count), serves)


def _hip() -> Finding:
    count = _devices("libamdhip64.so", "hipInit", "hipGetDeviceCount")
    serves = "GPUs of AMD: this version of ficco does not run on them yet"
    return Finding("HIP runtime", isinstance(count, int) and count > 0, _described(count), serves)


def _described(count: int | str) -> str:
    return count if isinstance(count, str) else f"{count} devices"


def _devices(library: str, init: str, get_count: str) -> int | str:
    """Return the number of devices that a vendor's library sees, or what it says instead."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return f"{library} not found"
    status = getattr(driver, init)(0)
    if status:
        return f"{init} gives error {status}"
    count = ctypes.c_int()
    status = getattr(driver, get_count)(ctypes.byref(count))
    return count.value if status == 0 else f"{get_count} gives error {status}"
