"""What the ranks of a group learn of one another's devices before their first windows are used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ficco.engines.window_layout import Layout
from ficco.plan import WindowBytes


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
    from ficco.runtime import signal_probe

    makers = SimpleNamespace(
        capabilities=lambda device: SimpleNamespace(pci=addresses[0]), REMEDY="",
        signal_kinds=lambda: ("copy",), open_gpu=lambda device: None,
        writable_words=lambda kind, at, rank: [other == rank for other in range(len(at))],
    )  # fmt: skip
    probe = SimpleNamespace(send=lambda value: "", look=lambda value: "")
    monkeypatch.setattr(signal_probe, "vendor", lambda: makers)
    monkeypatch.setattr(signal_probe, "ordinal", lambda: 0)
    monkeypatch.setattr(signal_probe, "Probe", lambda *_: probe)
    monkeypatch.setattr(signal_probe.torch.cuda, "synchronize", lambda: None)

    def gathered(own: Any) -> list[Any]:
        return [(at, *own[1:]) if isinstance(own, tuple) else own for at in addresses]

    runtime: Any = SimpleNamespace(rank=0, world=len(addresses), gathered=gathered)
    found = signal_probe.probed_signals(runtime, [], [], Layout(WindowBytes()))
    assert found.shared == shared
    assert len(found.writable) == len(addresses)
