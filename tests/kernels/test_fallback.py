"""Kernels that the pack lacks: compiled by Triton in other processes, or launched by Triton."""

from __future__ import annotations

import importlib
import io
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ficco.core.errors import EngineError
from ficco.kernels import compile_worker, compiling, fallback, loading, pack
from ficco.kernels.arrays import Described, DescribedArrays
from ficco.kernels.summing import launch_of
from ficco.kernels.variants import Launch, Variant, variant_of


class Arrays(DescribedArrays):
    """Of a device that is current."""

    def current(self) -> tuple[int, int]:
        return 0, 7


def total(cols: int, count: int = 2, capability: int = 90) -> Launch:
    matrix = Described(1 << 20, (16, cols), (cols, 1), "float16")
    return launch_of(matrix, 16, count, matrix, 0, None, matrix, Arrays(capability, 132))


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "_compiled", {})


def test_what_the_pack_lacks_is_compiled_together(
    nothing_compiled: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Any,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(fallback, "_FIRST_REPORT_S", 0.0)
    (tmp_path / "triton.py").write_text("raise SystemExit('triton.py of the current folder ran')")
    monkeypatch.chdir(tmp_path)
    wanted = [variant_of(total(64, count)) for count in (2, 3, 2)]
    assert pack.find(wanted[0], 90) is not None
    fallback.compile_together(wanted, 90)
    assert not fallback._compiled, "what is in the pack is not compiled"

    monkeypatch.setenv("FICCO_PACK", "0")
    with caplog.at_level(logging.WARNING, "ficco"):
        fallback.compile_together(wanted, 90)
    assert "FICCO_PACK=0 is set" in caplog.text and "of 2 are compiled by Triton" in caplog.text
    assert set(fallback._compiled) == {(90, each) for each in wanted}
    found = fallback.find(wanted[0], 90)
    monkeypatch.delenv("FICCO_PACK")
    packed = pack.find(wanted[0], 90)
    assert packed is not None and found.cubin.startswith(b"\177ELF")
    assert found.record == {name: packed.record[name] for name in found.record}


HOLDER = """
import sys
from ficco.kernels.compile_worker import Turns, lock_file
turns = Turns(lock_file())
assert turns.take(sys.argv[1], wait=sys.argv[2:] == ["wait"])
print("held", flush=True)
sys.stdin.read()
"""


def test_ranks_compile_a_variant_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What another process compiles is left for later, and then waited for."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    first, second = (variant_of(total(64, count)) for count in (2, 3))
    compiled: list[str] = []

    def compile_variant(variant: Variant, capability: int) -> None:
        compiled.append(variant.key)
        raise EngineError("it is only counted")

    monkeypatch.setattr(compile_worker, "compile_variant", compile_variant)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{first.text}\n{second.text}\n"))
    command = [sys.executable, "-P", "-c", HOLDER, first.key]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        worker = threading.Thread(target=compile_worker.main, args=(90, tmp_path), daemon=True)
        worker.start()
        end = time.monotonic() + 20
        while not compiled and time.monotonic() < end:
            worker.join(0.05)
        worker.join(0.2)
        assert worker.is_alive() and compiled == [second.key]
        holder.stdin.close()
    worker.join(10)
    assert compiled == [second.key, first.key]
    assert (tmp_path / f"{first.key}.error").exists()


def test_all_that_wait_for_a_variant_go_on_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    turns = compile_worker.Turns(compile_worker.lock_file())
    command = [sys.executable, "-P", "-c", HOLDER, "a0", "wait"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert not turns.take("a0", wait=False)
        taken = threading.Thread(target=turns.take, args=("a0", True), daemon=True)
        taken.start()
        taken.join(10)
        assert not taken.is_alive(), "a lock that others wait for is not shared"
        holder.stdin.close()


def test_without_a_file_that_can_be_locked_there_are_no_turns(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    turns = compile_worker.Turns(tmp_path / "file" / "ficco.lock")
    assert turns.take("a0", wait=True) and turns.take("a0", wait=False)
    turns.leave("a0")


def test_a_kernel_that_cannot_be_compiled_is_an_error(
    nothing_compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = Variant("sum_terms", ("*bf16",), True, (), 2, 3)  # it has more parameters
    pytest.importorskip("triton")
    with pytest.raises(EngineError, match=r"not in the pack \(1 of sum_terms\); Triton failed"):
        fallback.find(odd, 90)
    monkeypatch.setattr(fallback, "why_not", lambda: "Triton is not installed")
    with pytest.raises(EngineError, match="Triton is not installed; pip install triton"):
        fallback.find(odd, 90)


def test_an_unknown_layout_is_launched_by_triton(
    nothing_compiled: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Native code does not describe it; Triton's launch gets all arguments, by name."""
    pytest.importorskip("triton")
    said: list[Any] = []

    class Function:
        def warmup(self, grid: tuple[int, ...], **arguments: Any) -> Any:
            said.append(("loaded", grid, arguments))
            return SimpleNamespace(run=None)

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda **arguments: said.append(("launched", grid, arguments))

    def lacks(variant: Variant, capability: int) -> None:
        raise fallback.ByTriton("the kernel sum_terms is compiled by Triton 9.9.0")

    launch = total(40, capability=86)
    monkeypatch.setattr(loading, "_loaded", {})
    monkeypatch.setattr(fallback, "find", lacks)
    monkeypatch.setattr(loading, "function_of", lambda kernel: Function())
    loading._warn.cache_clear()
    with pytest.raises(EngineError, match=r"Triton 9\.9\.0"):
        loading.code(launch)
    with caplog.at_level(logging.WARNING, "ficco"):
        enqueue = loading.prepared(launch)
    assert "launched by Triton, which takes longer" in caplog.text
    assert [what for what, *_ in said] == ["loaded"]
    enqueue()
    _, (what, grid, arguments) = said
    assert (what, *said[0][1:]) == ("launched", grid, arguments) and grid == launch.grid
    names = [name for name, *_ in launch.kernel.parameters]
    assert [*arguments] == [*names, "num_warps", "num_stages", "enable_fp_fusion"]
    assert arguments["num_warps"] == launch.warps and arguments["cols"] == 40
    assert arguments["target"].data_ptr() == 1 << 20 and arguments["target"].dtype == "fp16"
    assert arguments["slots"].dtype == "fp16"


@pytest.mark.parametrize(
    "lacks",
    [
        "triton:compile", "triton.compiler:ASTSource", "triton.backends.compiler:GPUTarget",
        "metadata", "num_ctas", "tensordesc_meta", "asm",
    ],
)  # fmt: skip
def test_without_a_private_name_kernels_are_launched_by_triton(
    lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What native code would need cannot be known, which is a reason and no crash."""
    pytest.importorskip("triton")
    from ficco.core.private import finding, triton_core

    variant = variant_of(total(40, capability=86))
    if ":" in lacks:
        monkeypatch.setattr(finding, "ASKED", [])
        monkeypatch.setattr(finding, "ABSENT", {})
        with monkeypatch.context() as change:
            change.setattr(finding, "resolve", without(lacks, finding.resolve))
            importlib.reload(triton_core)
        absent = dict(finding.ABSENT)
    else:
        facts = {name: 0 for name in triton_core.Facts._fields if name != lacks}
        made = {"metadata": SimpleNamespace(**facts), "asm": {"cubin": b"", "ptx": ""}}
        made.pop(lacks, None)
        monkeypatch.setattr(triton_core, "compile_ahead", lambda *given: SimpleNamespace(**made))
        absent = {}
    try:
        with pytest.raises(EngineError, match="it has to be launched by Triton"):
            compiling.compile_variant(variant, 86)
        assert list(absent) == [lacks] * (":" in lacks)
    finally:
        if ":" in lacks:
            importlib.reload(triton_core)
            assert not triton_core.why_not_ahead()


def without(name: str, resolve: Callable[[str], Any]) -> Callable[[str], Any]:
    def resolve_others(asked: str) -> Any:
        if asked == name:
            raise AttributeError(asked)
        return resolve(asked)

    return resolve_others


def test_an_unknown_triton_tells_so() -> None:
    assert not compiling.known("3.10.0") and not compiling.known("4.0")
    assert all(compiling.known(f"{version}.1") for version in ("3.5", "3.6", "3.7", "3.8", "3.9"))
