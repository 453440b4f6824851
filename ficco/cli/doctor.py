"""`ficco doctor`: report what this machine has, what is missing, and how fast it is."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ficco.cli.arguments import HOST_RANKS, add_command
from ficco.cli.engine_choice import MOST_GPUS, driver_trouble, profile_of
from ficco.cli.findings import (
    Finding,
    amd_findings,
    check_report,
    devices_of,
    framework_findings,
    installed,
    on_devices,
    peer_access,
    probe_findings,
    unusable,
    verdict,
    write_report,
)
from ficco.cli.progress_line import Working
from ficco.core.errors import EngineError, InputError, MachineError, counted
from ficco.core.machine import Machine

if TYPE_CHECKING:
    from ficco.engine.cuda import Capabilities
    from ficco.engine.probe_record import Record


def add_to(commands: Any) -> None:
    """Register the command."""
    parser = add_command(
        commands, "doctor", "report what this machine has, what is missing, and what auto uses",
        "Check this machine, or measure a profile of it. Exit 0 if ficco can run here at all, else "
        "1.",
        (
            ("what this machine has, and what to install for what is missing", "ficco doctor"),
            ("measure this machine, and predict from what was measured",
             "ficco doctor --profile here.toml; ficco explain --machine here.toml"),
        ),
    )  # fmt: skip
    parser.add_argument(
        "--hold-multiprocessors", action="store_true",
        help="Measure which driver calls need an SM. A kernel occupies all of GPU 0 for "
        "about three seconds in total, and other work on this GPU waits. Default: not measured.",
    )  # fmt: skip
    parser.add_argument(
        "--probes", action=argparse.BooleanOptionalAction, default=None,
        help="Probe several GPUs: whether copies arrive, need no SM, and come before "
        "their signals, whether waits end, and how fast copies are. It takes a few seconds, in "
        "which other work on the GPUs waits. Default: only AMD's are probed.",
    )  # fmt: skip
    parser.add_argument(
        "--report", metavar="FILE.json",
        help="Also write FILE.json, to attach to a report of a problem: all findings, the "
        "measurements of the probes, and variables of drivers. Probes all GPUs unless --no-probes "
        "is given. Default: no file.",
    )  # fmt: skip
    parser.add_argument(
        "--frameworks", action="store_true",
        help="List the frameworks whose layers ficco overlaps. Import those with a module in "
        "ficco.integrations, which may take a minute, and look for the names that it needs. "
        "Default: none is imported.",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true",
        help="Print JSON on stdout, and nothing else; not with --profile. Default: a table.",
    )  # fmt: skip
    profile = parser.add_argument_group("profile")
    profile.add_argument(
        "--profile", metavar="FILE.toml",
        help="Measure this machine, in two minutes or less, and write FILE.toml, a profile for "
        "--machine: of the GPUs if ficco can run on several, else of the host engine. Default: "
        "nothing is measured.",
    )  # fmt: skip
    profile.add_argument(
        "--ranks", type=int, metavar="N",
        help=f"With --profile: the number of ranks. Default: {HOST_RANKS}; on GPUs the number of "
        "GPUs.",
    )  # fmt: skip
    profile.add_argument(
        "--processes", action="store_true",
        help="With --profile: measure the host engine with processes and PyTorch, which the torch "
        "functions use. Default: threads and NumPy, which `ficco run` uses.",
    )  # fmt: skip
    parser.set_defaults(main=_main)


def _main(args: argparse.Namespace) -> int:
    if args.profile is not None and args.json:
        raise InputError(
            f"--json with --profile {args.profile}: the profile is the result; leave --json out"
        )
    if args.profile is not None and (args.report is not None or args.probes):
        raise InputError(
            f"--profile {args.profile} with --report or --probes: run them one after the other"
        )
    for flag in ("hold_multiprocessors", "frameworks"):
        if args.profile is not None and getattr(args, flag):
            raise InputError(
                f"--{flag.replace('_', '-')} with --profile {args.profile}: run them one after the "
                "other"
            )
    if args.profile is not None:
        from ficco.cli.profile import write_profile

        return write_profile(args.profile, args.ranks, args.processes)
    report = check_report(args.report) if args.report is not None else None
    if args.processes:
        raise InputError("--processes needs --profile FILE.toml")
    if args.ranks is not None:
        raise InputError(f"--ranks {args.ranks} needs --profile FILE.toml")
    from ficco.cli.report.tables import width_of, wrapped

    with Working("ficco doctor") as work:
        work.say("checks this machine")
        probes = report is not None if args.probes is None else args.probes
        amd, amd_records = amd_findings(args.probes is not False, work.say)
        probed, records = _cuda_probes(work.say) if probes else ([], [])
        findings = [
            _platform(),
            _native(),
            _memory(),
            _numpy(),
            _torch(),
            *_cuda(),
            *probed,
            *(_multiprocessor_use() if args.hold_multiprocessors else []),
            *_libraries(),
            *amd,
            *(framework_findings(work.say) if args.frameworks else []),
        ]
    if report is not None:
        write_report(report, findings, [*records, *amd_records])
    usable, last = not unusable(findings), verdict(findings)
    if args.json:
        facts = [f._asdict() for f in findings]
        print(json.dumps({"ok": usable, "verdict": last, "findings": facts}))
        return 0 if usable else 1
    print(_text(findings))
    print(wrapped(f"verdict: {last}", width_of(sys.stdout), "  "))
    if report is not None:
        print(f"the report is in {report}")
    return 0 if usable else 1


def _text(findings: Sequence[Finding]) -> str:
    """Return a table of the findings, or in narrow terminals a paragraph for each."""
    from rich.table import Table
    from rich.text import Text

    from ficco.cli.report.tables import WIDEST, drawn, width_of, wrapped

    width = width_of(sys.stdout)
    if width < WIDEST:
        lines = []
        for f in findings:
            do = f" To do: {f.do}." if f.do else ""
            text = f"{'yes' if f.ok else 'no':<4} {f.name}: {f.found}. Used for: {f.serves}.{do}"
            lines.append(wrapped(text, width, " " * 5))
        return "\n".join(lines)
    table = Table(box=None, pad_edge=False)
    for name in ("", "check", "found", "used for", "to do"):
        table.add_column(name, overflow="fold")
    for f in findings:
        cells = ("yes" if f.ok else "no", f.name, f.found, f.serves, f.do)
        table.add_row(*map(Text, cells))  # Text: brackets are not parsed as markup
    return drawn(table)


def _platform() -> Finding:
    system, arch = platform.system(), platform.machine()
    ok = system == "Linux" and arch in ("x86_64", "aarch64")
    cores = counted(os.cpu_count() or 1, "core")
    found = f"{system} {arch}, Python {platform.python_version()}, {cores}"
    return Finding("platform", ok, found, "everything", "" if ok else "use Linux, x86-64 or arm64")


def _native() -> Finding:
    try:
        from ficco.engine import host
    except EngineError as error:
        return Finding.failed("native core", error, "everything: the host engine's queues")
    found = f"threads as copy engines, {host.MOST_LANES} queues per rank"
    return Finding("native core", True, found, "everything: the host engine's queues")


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


def _cuda() -> list[Finding]:
    """Check NVIDIA's driver, its devices, and PyTorch's support for them."""
    serves = "NVIDIA GPUs: operators on CUDA tensors, `ficco run`"
    try:
        from ficco.engine import cuda
    except EngineError:
        return [Finding("CUDA driver", False, "not checked", serves, "see native core")]
    try:
        version, count = cuda.served_version(), cuda.device_count()
    except cuda.GpuError as error:
        return [Finding("CUDA driver", False, driver_trouble(error), serves, _mend(str(error))),
                *_torch_on_gpus()]  # fmt: skip
    own, devices = devices_of(cuda, count, "GPU", lambda here: (True, _described(here), ""))
    findings = [Finding("CUDA driver", count > 0, f"CUDA {version}, {count} devices", serves), *own]
    if count > 1 and len(devices) == count:
        sizes = sorted({2, 4, min(count, MOST_GPUS)} - {*range(count + 1, 5)})
        access = peer_access(
            "peer access", devices, "several GPUs, which write to each other's memory",
            "run groups of GPUs that reach each other (CUDA_VISIBLE_DEVICES); others fall back to "
            "torch.distributed",
        )  # fmt: skip
        findings += [access, *([_signals(count)] if access.ok else [])]
        findings += [_profile(size, version) for size in sizes]
    if count:
        findings.append(_settings())
    return [*findings, *_torch_on_gpus()]


def _mend(error_text: str) -> str:
    if "the driver has no " in error_text:
        return "install a driver of CUDA 12.0 or newer"
    if "NO_DEVICE" in error_text and "CUDA_VISIBLE_DEVICES" in os.environ:
        return "CUDA_VISIBLE_DEVICES is set: does it name a GPU?"
    return ""


def _described(here: Capabilities) -> str:
    signatures = {"12.8": here.batch_copy_12_8, "13.0": here.batch_copy_13_0}
    batches = " and ".join(name for name, there in signatures.items() if there)
    return (
        f"{here.name}, compute capability {here.major}.{here.minor}, {here.copy_engines} copy "
        f"engines, flush of remote writes: {'yes' if here.flush_remote_writes else 'no'}, batch "
        f"copies: {f'as of CUDA {batches}' if batches else 'no'}"
    )


def _signals(count: int) -> Finding:
    """Send data and signals between all GPUs, as a group does when it is opened."""
    from ficco.engine import cuda

    serves = "groups of GPUs: words that notify peers of data"
    try:
        kind = on_devices(cuda, count, lambda _, kind: kind)
    except (EngineError, InputError, cuda.GpuError) as error:
        return Finding.failed("signals", error, serves, "groups run torch.distributed")
    how = "copies of 4 bytes" if kind == "copy" else "stream writes"
    found = f"by {how}; they arrive after their data, eager and from a graph"
    return Finding("signals", True, found, serves)


def _cuda_probes(say: Callable[[str], None]) -> tuple[list[Finding], list[Record]]:
    """Probe NVIDIA's devices, if there are several."""
    try:
        from ficco.engine import cuda

        count = cuda.device_count()
    except (EngineError, RuntimeError):  # _cuda reports it
        return [], []
    return probe_findings("NVIDIA", cuda, count, cuda.blocked_by(), say)


def _profile(ranks: int, version: str) -> Finding:
    """Check the profile and the book that `auto` uses in groups of `ranks` GPUs."""
    from ficco.measure.selector.book import known

    name, serves = f"profile, {ranks} GPUs", "schedule='auto', which is `serial` without one"
    try:
        profile = profile_of(Machine.named("cuda"), ranks)
        books = known(profile.name)
    except MachineError as error:
        return Finding.failed(name, error, serves)
    except InputError as error:
        return Finding(name, False, str(error), serves, "set FICCO_BOOK to another table, or none")
    misfits = [book.unfit(profile, version) for book in books]
    parts = [f"{profile.name}, {profile.source or profile.about}"]
    for book, misfit in zip(books, misfits, strict=True):
        caution = book.caution(version)
        held = f"{len(book.points)} shapes and execution modes"
        held += f" ({caution})" if caution else ""
        parts.append(f"tuning table {book.name}: {misfit or held}")
    do = "`ficco sweep` measures one; until then auto uses predictions" if all(misfits) else ""
    return Finding(name, True, "; ".join(parts), serves, do)


def _settings() -> Finding:
    """Check the environment for variables that change how the driver runs streams."""
    names, hints = [], []
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        names.append("CUDA_LAUNCH_BLOCKING")
        hints.append("unset CUDA_LAUNCH_BLOCKING: operators fall back to torch.distributed")
    blocking = bool(names)
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        names.append("CUDA_DEVICE_MAX_CONNECTIONS=1")
        hints.append(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 works, but all streams share one hardware queue: the "
            "watchdog needs GPU memory for a second context to release a stuck stream"
        )
    summary = f"set: {', '.join(names)}" if names else "nothing set that matters"
    return Finding("CUDA settings", not blocking, summary, "overlap on GPUs", "; ".join(hints))


def _multiprocessor_use() -> list[Finding]:
    """Measure which driver calls of GPU 0 need a multiprocessor, with GPU 1 as the peer."""
    name, serves = "multiprocessors", "calls that overlap with a GEMM that fills the GPU"
    try:
        from ficco.engine import cuda
        from ficco.measure.profiling.gpu.multiprocessor_use import probe
    except EngineError as error:
        return [Finding(name, False, str(error), serves, "see native core")]
    try:
        count = cuda.device_count()
        reached = count > 1 and all(cuda.capabilities(a).peers[1 - a] for a in (0, 1))
        uses = probe(0, 1 if reached else None)
    except (EngineError, cuda.GpuError) as error:
        return [Finding.failed(name, error, serves)]
    groups: dict[str, list[str]] = {"none needed by": [], "needed by": []}
    for call, use in uses.items():
        if use.eager == use.in_graph:
            groups["needed by" if use.eager else "none needed by"].append(call)
        else:
            where = ("a stream", "a graph") if use.eager else ("a graph", "a stream")
            groups["needed by"].append(f"{call} (in {where[0]})")
            groups["none needed by"].append(f"{call} (in {where[1]})")
    return [
        Finding(name, True, f"{about}: {'; '.join(calls)}", serves)
        for about, calls in groups.items()
        if calls
    ]


def _torch_on_gpus() -> list[Finding]:
    if importlib.util.find_spec("torch") is None:
        return []  # _torch has reported it
    serves = "operators on CUDA tensors, `ficco run --engine cuda`"
    try:
        from ficco.measure.executors import torch_offers
    except (EngineError, ImportError, OSError) as error:
        return [Finding("torch on GPUs", False, f"cannot be loaded: {error}", serves)]
    offers = torch_offers()
    if offers.rocm:
        found = f"a build for ROCm {offers.rocm}, {offers.devices} devices"
        return [
            Finding("torch on GPUs", True, found, "functions, models and `ficco run` on AMD GPUs")
        ]
    available = {
        f"CUDA {offers.cuda}": bool(offers.cuda),
        f"{offers.devices} devices": offers.devices > 0,
        "NCCL": offers.nccl,
        "symmetric memory": offers.symmetric_memory,
        "Triton": offers.triton,
    }
    features = ", ".join(name for name, present in available.items() if present)
    lacking = offers.lacking()
    do = "install a CUDA build of torch>=2.9" if lacking and not offers.cuda else ""
    found = f"{lacking}; has {features}" if lacking else features
    return [Finding("torch on GPUs", not lacking, found, serves, do), *_absent_names()]


def _absent_names() -> list[Finding]:
    """Report which private names PyTorch and Triton lack, and what ficco uses instead."""
    from ficco.core.private import torch_core, torch_layers  # noqa: F401 - they look up the names
    from ficco.core.private.finding import ABSENT

    if importlib.util.find_spec("triton") is not None:
        from ficco.core.private import triton_core  # noqa: F401
    serves = "the speed of calls; results are right without them"
    do = "use releases of PyTorch and Triton that README names"
    return [
        Finding(f"name {name}", False, f"absent; instead: {instead}", serves, do)
        for name, instead in ABSENT.items()
    ]


def _libraries() -> list[Finding]:
    """Check the Python packages for GPUs other than PyTorch."""
    findings = []
    for name, packages, serves in (
        ("CuPy", ("cupy-cuda13x", "cupy-cuda12x", "cupy"), "GPUs of one process: their arrays"),
        ("cuda-bindings", ("cuda-bindings",), "`ficco doctor --profile` on GPUs"),
    ):
        version = next(filter(None, map(installed, packages)), None)
        version_text = f"{name} {version}" if version else "not installed"
        do = "" if version else "on GPUs: pip install 'ficco[cuda]'"
        findings.append(Finding(name, version is not None, version_text, serves, do))
    return findings
