"""The operators of ficco, one record per file, and `register` for further ones.

A record holds all data and code that is specific to an operator (see `Operator`). Other modules
loop over records and name no operator. This package loads neither NumPy nor PyTorch.
"""

from __future__ import annotations

from ficco.operators import (
    all_gather_matmul,
    all_to_all_matmul,
    auxiliary,
    bag_functions,
    column_matmul,
    dispatch_matmul,
    embedding_all_to_all,
    expert_functions,
    matmul_all_reduce,
    matmul_all_to_all,
    matmul_combine,
    matmul_reduce_scatter,
)
from ficco.operators.registry import (
    Flow,
    Function,
    Operator,
    get,
    names,
    register,
    register_function,
)

__all__ = ["OPERATORS", "Flow", "Function", "Operator", "get", "names", "register"]

OPERATORS = tuple(
    register(module.OPERATOR).name
    for module in (
        all_gather_matmul,
        matmul_reduce_scatter,
        matmul_all_reduce,
        all_to_all_matmul,
        matmul_all_to_all,
        embedding_all_to_all,
        dispatch_matmul,
        matmul_combine,
    )
)
"""The names of ficco's own operators."""

for _function in (
    column_matmul.FUNCTION,
    bag_functions.POOLED,
    auxiliary.EXCHANGE_ROWS,
    auxiliary.TOKEN,
    auxiliary.ROUTE_EXPERTS,
    auxiliary.RETURN_GATES,
    expert_functions.EXPERT_GRADIENT,
):
    register_function(_function)
