"""The check that repeated calls make of a runtime's groups, in native code."""

from __future__ import annotations

import os

import pytest

from ficco.core.machine import Machine
from ficco.engine import groups
from ficco.engine.devices import are_well


@pytest.fixture
def group() -> groups.Group:
    memory = groups.create(2, 4096)
    try:
        return groups.join(memory, 2, 0, 4096, Machine.named("host"), 5.0)
    finally:
        os.close(memory)


def test_a_group_is_well_until_it_fails(group: groups.Group) -> None:
    assert are_well([group], [])
    assert are_well([group, group], [])
    group.fail(0)
    assert not are_well([group], [])
    group.close()


def test_a_runtime_without_a_group_is_closed() -> None:
    assert not are_well([], [])
