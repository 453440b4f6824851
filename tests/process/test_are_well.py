"""The check that repeated calls make of a runtime's groups, in native code."""

from __future__ import annotations

import os

import pytest

from ficco.engines import shared_memory
from ficco.engines.devices import are_well
from ficco.machine import Machine


@pytest.fixture
def group() -> shared_memory.Group:
    memory = shared_memory.create(2, 4096)
    try:
        return shared_memory.join(memory, 2, 0, 4096, Machine.named("host"), 5.0)
    finally:
        os.close(memory)


def test_a_group_is_well_until_it_fails(group: shared_memory.Group) -> None:
    assert are_well([group], [])
    assert are_well([group, group], [])
    group.fail(0)
    assert not are_well([group], [])
    group.close()


def test_a_runtime_without_a_group_is_closed() -> None:
    assert not are_well([], [])
