"""Native code reads what a call's cache key says of tensors."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from ficco import _native


@pytest.fixture
def facts(torch: Any) -> Any:
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this PyTorch has no C exchange API of DLPack")
    return _native.TensorReader(torch.Tensor, torch.nn.Parameter).facts


def test_equal_facts_are_equal_bytes_and_no_others(torch: Any, facts: Any) -> None:
    x = torch.zeros(6, 8)
    different = [
        (x,), (x, None), (None, x), (x, x), (x.t(),), (x[:, :7],), (x[:5],), (x.view(6, 8, 1),),
        (x.view(48),), (x.half(),), (x.bfloat16(),), (x.short(),), (x[0, 0],), (torch.zeros(8, 6),),
        (), (None,), (x[:1].as_strided((1, 8), (9, 1)),), (x[:1],), (x[:0],),
    ]  # fmt: skip
    found = [facts(tensors) for tensors in different]
    assert all(isinstance(each, bytes) for each in found)
    for (one, first), (other, second) in combinations(enumerate(found), 2):
        assert first != second, (one, other)
    again = torch.nn.Parameter(torch.ones(6, 8))
    assert facts((x, None)) == facts((again, None)) == facts((x.clone(), None))


def test_what_has_no_facts(torch: Any, facts: Any) -> None:
    class Mine(torch.Tensor):
        pass

    x = torch.zeros(2, 3)
    for other in (
        3, "x", [x], x.to_sparse(), x.numpy(), torch.zeros(2, dtype=torch.cfloat).conj().imag,
        x.as_subclass(Mine), torch.nested.nested_tensor([x], layout=torch.jagged),
    ):  # fmt: skip
        assert facts((other,)) is None
        assert facts((x, other)) is None
    assert isinstance(facts((x,)), bytes)  # the errors are gone


def test_types_without_the_api_are_refused() -> None:
    with pytest.raises(AttributeError, match="__dlpack_c_exchange_api__"):
        _native.TensorReader(int, int)
    strange = type("Strange", (), {"__dlpack_c_exchange_api__": 3})
    with pytest.raises(ValueError, match="PyCapsule"):
        _native.TensorReader(strange, int)
