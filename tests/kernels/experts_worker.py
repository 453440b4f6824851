"""Runs the kernels of experts under Triton's interpreter, or reads their compiled text.

TRITON_INTERPRET=1 python experts_worker.py lists|products|waves|returned|gradients|activation|alone
python experts_worker.py assembly
"""

from __future__ import annotations

import re
from typing import Any

import torch
from compiling import compiled
from experts_cases import Case, spread
from interpreting import run_named

from ficco.cli.packing.experts import expert_launches
from ficco.kernels.arrays import DescribedArrays
from ficco.kernels.experts_activation import swiglu, swiglu_gradient
from ficco.kernels.experts_tiles import ExpertTile

TILE = ExpertTile(16, 32, 16, 2, 4, 3)
TOKENS, EXPERTS = (9, 0, 5), 2
Tensor = torch.Tensor


def _ids(kind: str, topk: int = 2) -> Tensor:
    total, all_experts = sum(TOKENS), EXPERTS * len(TOKENS)
    ids = spread(total, topk, all_experts)
    if kind == "one":
        ids[:] = EXPERTS  # of rank 1, twice in each token
    if kind == "few":  # no experts, wrong ids, and experts without rows
        ids = torch.where(ids % 2 == 0, -1, ids)
        ids[3, 1], ids[11, 0] = all_experts, all_experts + 7
    return ids.int().contiguous()


def _case(kind: str, dtype: torch.dtype = torch.bfloat16, d: int = 32, n: int = 48) -> Case:
    return Case(_ids(kind), TOKENS, EXPERTS, d, n, dtype, TILE)


def lists() -> None:
    """Lists of all kinds; several chunks; no tokens at all."""
    for kind in ("even", "one", "few"):
        case = _case(kind)
        for rank in range(3):
            case.listed(rank)
    many = Case(spread(300, 3, 150), (0, 200, 100), 50, 16, 16)
    for rank in range(3):
        many.listed(rank)
    nothing = torch.empty(0, 2, dtype=torch.int32)
    Case(nothing, (0, 0), 2, 16, 16).listed(1)


def products() -> None:
    """Products of all rows; more and fewer rows of y than there are; sizes of no tile."""
    for number, kind in enumerate(("even", "one", "few")):
        case = _case(kind, (torch.bfloat16, torch.float16)[number % 2])
        for rank in range(3):
            count = len(case.wanted_list(rank)[0])
            case.multiply(rank, max(count + 1 - 2 * (rank % 2), 1), number % 2 == 1, (0,))
    for turned in (False, True):
        _case("even", d=20, n=27).multiply(0, 30, turned, (0,))
        _case("even", d=40, n=48).multiply(0, 30, turned, (0,))  # the depth is no whole tile


def waves() -> None:
    """Own rows and those of others, in both orders."""
    for order in ((1, 2), (2, 1)):
        for kind in ("even", "few"):
            case = _case(kind)
            case.multiply(0, len(case.wanted_list(0)[0]) + 3, False, order)


def returned() -> None:
    """Rows at their owners, and sums; a capacity that is exceeded by one row."""
    for kind in ("even", "one", "few"):
        case = _case(kind, d=48, n=32)
        counts = [len(case.wanted_list(rank)[0]) for rank in range(3)]
        case.give_back([count + 2 for count in counts], kind == "one")
        case.give_back([max(count - 1, 0) for count in counts], kind == "even")
    _case("even", d=20, n=27).give_back([40, 40, 40], False)


def gradients() -> None:
    """Gradients of rows by index and in the order of the list."""
    for kind, by in (("even", (True, False)), ("one", (False, True)), ("few", (False, False))):
        case = _case(kind)
        for rank in (0, 1):
            count = len(case.wanted_list(rank)[0])
            case.differentiate(rank, max(count + 1 - 2 * rank, 1), *by)
    _case("even", d=20, n=27).differentiate(0, 40, True, False)
    _case("even").differentiate(0, 40, True, True)


def activation() -> None:
    """Swiglu times gates, and its gradients; rows that no expert has stay as they are."""
    case = _case("even")
    rows, slots = case.listed(0), case.ids.numel()
    count = len(case.wanted_list(0)[0])
    for capacity, f in ((count + 3, 20), (count - 1, 1100)):
        some = min(count, capacity)
        z, gates = torch.randn(capacity, 2 * f, requires_grad=True), torch.rand(slots)
        gates.requires_grad_()
        h, dh = torch.full((capacity, f), torch.nan), torch.randn(capacity, f)
        swiglu(rows, z.detach(), gates.detach(), h)
        chosen = rows.routing[rows.list_at :][:some].long()
        wanted = torch.nn.functional.silu(z[:some, :f]) * z[:some, f:] * gates[chosen][:, None]
        torch.testing.assert_close(h[:some], wanted)
        assert h[some:].isnan().all()
        wanted.backward(dh[:some])
        dz, dgates = torch.full_like(z, torch.nan), torch.zeros(slots)
        swiglu_gradient(rows, z.detach(), gates.detach(), dh, dz, dgates)
        torch.testing.assert_close(dz[:some], z.grad[:some], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(dgates, gates.grad, atol=1e-4, rtol=1e-4)
        assert dz[some:].isnan().all()


def alone() -> None:
    """A NaN in a token reaches the rows of this token alone."""
    case = _case("even")
    case.x[2] = float("nan")
    case.x[10, 5] = float("inf")
    y = case.multiply(0, 30, False, (0,))
    listed, _, _ = case.wanted_list(0)
    spoiled = torch.isin(listed // case.topk, torch.tensor([2, 10]))
    whole = y[: len(listed)].isfinite().all(1)
    assert torch.equal(whole, ~spoiled)


def assembly() -> None:
    """Kernels of the pack load rows and store results by 16 bytes, and multiply by wgmma."""
    for launch in expert_launches(DescribedArrays(90, 132), "bfloat16", True):
        if launch.kernel.name not in {"experts_product", "experts_gradient"} or launch.odd:
            continue
        text: Any = compiled(launch).asm["ptx"]
        about = f"{launch.kernel.name} {launch.arguments['BLOCK_M']}"
        assert "wgmma.mma_async" in text, about
        if not (launch.arguments.get("A_BULK") and launch.arguments["B_BULK"]):
            by_16 = r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10"
            assert re.search(by_16, text), about
        assert "st.global.v4" in text and not re.search(r"st\.global\.b16", text), about


if __name__ == "__main__":
    run_named({
        "lists": lists, "products": products, "waves": waves, "returned": returned,
        "gradients": gradients, "activation": activation, "alone": alone, "assembly": assembly,
    })  # fmt: skip
