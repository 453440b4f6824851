"""reserve(): which other kernels a serving model's calls may come to need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ficco.api import sizing  # noqa: E402
from ficco.api.layers.layer import ATTRIBUTE, Layer, Options, Ranks, Seen  # noqa: E402
from ficco.core.machine import Machine  # noqa: E402
from ficco.measure import selector  # noqa: E402
from ficco.operators.problem import Problem  # noqa: E402


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
    machine = replace(machine, costs=replace(machine.costs, gated_gemm=1.25))  # which is not chosen
    problem = Problem.chunked("matmul_reduce_scatter", 4, 2048, 8192, 16384, "bfloat16")
    found = selector.choose(problem, machine, "captured", by="rule")
    assert found.schedule.compute != "gated" and found.predicted_ms is not None
    answers: list[Any] = [found]
    monkeypatch.setattr(sizing, "choice_of", lambda layer: answers[-1])
    monkeypatch.setattr(sizing, "_kernels_and_problem", lambda layer: None)

    (other,) = sizing._gated_alternatives(_layer("auto", "cuda"))
    assert other.compute == "gated"
    least = min(ms for s, ms in found.alternatives if s.compute == "gated")
    assert dict(found.alternatives)[other] == least < sizing._NEAR_BEST * found.predicted_ms

    assert sizing._gated_alternatives(_layer("auto", "cpu")) == []
    assert sizing._gated_alternatives(_layer("hetero_unfused_1d", "cuda")) == []
    far = tuple((s, 2 * ms) for s, ms in found.alternatives)
    answers.append(replace(found, alternatives=far))
    assert sizing._gated_alternatives(_layer("auto", "cuda")) == []
    answers.append(replace(found, schedule=other))
    assert sizing._gated_alternatives(_layer("auto", "cuda")) == []

    summed = Problem.chunked("matmul_all_reduce", 4, 4096, 4096, 16384, "bfloat16")
    answers.append(selector.choose(summed, Machine.named("h200x4"), "captured", by="rule"))
    assert answers[-1].schedule.sums == "within"
    assert [each.sums for each in sizing._gated_alternatives(_layer("auto", "cuda"))] == ["apart"]


def test_what_a_capture_takes_is_made_ready_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind calls of fewer rows, of which there are more than plans are kept bound."""
    serving, training = _layer("serial", "cpu"), replace(_layer("serial", "cpu"), name="up")
    kinds = [(serving, [], False), (training, [], True)]
    called: list[tuple[str, int, bool]] = []

    def call(layer: Layer, weights: list[Any], rows: int, backward: bool) -> Layer:
        called.append((layer.name, rows, backward))
        return layer

    monkeypatch.setattr(sizing, "_kinds", lambda found, backward: iter(kinds))
    monkeypatch.setattr(sizing, "_call", call)
    monkeypatch.setattr(sizing, "_bytes_of", lambda calls, mixtures: 7)
    model = torch.nn.Module()
    model.__dict__[ATTRIBUTE] = serving
    assert sizing.reserve(model, 100) == 7
    whole = [("down", 100, False), ("up", 100, True)]
    assert called[:2] == whole and called[-4:] == whole * 2
    fewer = [rows for _, rows, _ in called[2:-4]]
    assert fewer == sorted(fewer, reverse=True) and (fewer[0], fewer[-1]) == (80, 1)
    assert all(called_of[0] == "down" for called_of in called[2:-4])
