"""What the ranks of a group learn of one another's devices before their first windows are used."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ficco.core.errors import InputError


@pytest.mark.parametrize(
    ("addresses", "shared"),
    [
        (["0:1", "0:2"], [False, False]), (["0:1", "0:1"], [True, True]),
        (["0:1", "0:2", "0:1"], [True, False, True]), (["0:1"], [False]),
    ],
)  # fmt: skip
def test_ranks_on_one_device_are_found_by_its_address(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], shared: list[bool]
) -> None:
    pytest.importorskip("torch")
    import torch

    from ficco.runtime import torch_gpu

    vendor = SimpleNamespace(
        capabilities=lambda device: SimpleNamespace(pci=addresses[0]),
        signal_kinds=lambda: ("copy",),
        writable_words=lambda kind, at, rank: [other == rank for other in range(len(at))],
    )
    monkeypatch.setattr(torch_gpu, "vendor", lambda: vendor)

    class Runtime:
        rank, device = 0, torch.device("cuda", 0)

    def exchange(what: str, values: Sequence[Any]) -> list[Any]:
        return [(at, *values[0][1:]) for at in addresses]

    runtime: Any = Runtime()
    gpu = torch_gpu.TorchGpu(runtime, None, len(addresses), torch_gpu.TorchDeviceCompute())
    assert gpu.kinds(exchange) == ("copy",)
    ranks = range(len(addresses))
    assert [gpu.shared(rank) for rank in ranks] == shared
    assert [len(gpu.writable("copy", rank)) for rank in ranks] == [len(addresses)] * len(addresses)


def test_ranks_that_use_one_gpu_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from ficco.runtime.gpus_of_group import reason_of

    facts = [
        {"device": 0, "pci": pci, "unreached": [], "reason": None}
        for pci in ("0000:01:00.0", "0000:02:00.0", "0000:01:00.0")
    ]
    assert reason_of(facts[:2]) is None
    with pytest.raises(InputError, match=r"ranks 0 and 2 use the same GPU \(0000:01:00.0\)"):
        reason_of(facts)
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")  # as tests do
    assert reason_of(facts) is None
