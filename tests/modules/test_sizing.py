"""size_windows(): which other kernels a serving model's calls may come to need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ficco import selector  # noqa: E402
from ficco.machine import Machine  # noqa: E402
from ficco.modules import sizing  # noqa: E402
from ficco.modules.layers.layer import Layer, Options, Ranks, Seen  # noqa: E402
from ficco.problem import Problem  # noqa: E402


def _layer(schedule: str, device: str) -> Layer:
    seen = Seen(
        "matmul_reduce_scatter", 2048, 4096, (8192,), torch.bfloat16, torch.device(device),
        2048, 1, False,
    )  # fmt: skip
    return Layer(
        "down", "RowwiseParallel", "row", Ranks.__new__(Ranks), Options(schedule, False, True),
        output_dim=0, seen=seen,
    )  # fmt: skip


def test_kernels_that_a_few_rows_more_need_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine.named("h200x4")
    problem = Problem.chunked("matmul_reduce_scatter", 4, 2048, 8192, 16384, "bfloat16")
    found = selector.choose(problem, machine, "captured", by="rule")
    assert found.schedule.compute != "gated" and found.predicted_ms is not None
    answers: list[Any] = [found]
    monkeypatch.setattr(sizing, "choice_of", lambda layer: answers[-1])

    other = sizing._one_launch(_layer("auto", "cuda"))
    assert other is not None and other.compute == "gated"
    least = min(ms for s, ms in found.alternatives if s.compute == "gated")
    assert dict(found.alternatives)[other] == least < sizing._NEAR * found.predicted_ms

    assert sizing._one_launch(_layer("auto", "cpu")) is None
    assert sizing._one_launch(_layer("hetero_unfused_1d", "cuda")) is None
    far = tuple((s, 2 * ms) for s, ms in found.alternatives)
    answers.append(replace(found, alternatives=far))
    assert sizing._one_launch(_layer("auto", "cuda")) is None
    answers.append(replace(found, schedule=other))
    assert sizing._one_launch(_layer("auto", "cuda")) is None
