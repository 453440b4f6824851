"""The corrections of Triton's interpreter that ficco makes for its users."""

from __future__ import annotations

import numpy as np
import pytest

from ficco.core.private import triton_interpreter


def test_a_comparison_has_the_type_of_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.9 refuses a mask of another type."""
    tl = pytest.importorskip("triton.language")
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    monkeypatch.setattr(builder, "binary_op", builder.binary_op)  # restored after the test
    triton_interpreter.let_comparisons_mask()
    one = interpreter.TensorHandle(np.array([1], np.int32), tl.int32)
    compared, added = builder().create_icmpEQ(one, one), builder().create_add(one, one)
    assert compared.data.dtype == bool and compared.dtype == tl.int1
    assert added.dtype == tl.int32
