"""Runs one kernel on odd shapes in every dtype and holds it against float64.

TRITON_INTERPRET=1 python sums_and_products_worker.py summing|products|exactly
"""

from __future__ import annotations

import sys

import torch
from interpreting import make_ready

from ficco.engine.compute.torch_device import TorchDeviceCompute
from ficco.engine.repeated_calls import CallSteps, Step
from ficco.kernels.summing import sum_partials

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def rounded(value: torch.Tensor, found: torch.Tensor, about: str) -> None:
    """Hold a result within one rounding of its dtype and a float32 sum of the exact value."""
    step = torch.finfo(found.dtype).eps
    bound = step * value.abs() + 1e-5
    assert ((found.double() - value).abs() <= bound).all(), about


def summing() -> None:
    for dtype in DTYPES:
        for count, own_at, rows, cols, bias in (
            (0, 0, 3, 5, False), (1, 0, 9, 513, True), (3, 1, 1, 1, False), (3, 3, 17, 700, True),
            (7, 4, 8, 512, True),
        ):  # fmt: skip
            wide = torch.randn((count + 1) * (rows + 2), cols + 3).to(dtype)
            slots, distance = wide[:rows, :cols], rows + 2
            parts = [wide[i * (rows + 2) :][:rows, :cols] for i in range(count)]
            own = torch.randn(rows, cols)
            offset = torch.randn(1, cols).to(dtype) if bias else None
            whole = torch.full((rows + 1, cols + 2), torch.nan, dtype=dtype)
            target = whole[:rows, :cols]
            sum_partials(slots, distance, count, own, own_at, offset, target)
            want = own.double() + sum(part.double() for part in parts)
            want = want + offset.double() if bias else want
            rounded(want, target, f"{dtype} {count} {own_at} {rows}x{cols} {bias}")
            assert whole[rows:].isnan().all() and whole[:, cols:].isnan().all(), "wrote beyond"


def products() -> None:
    """GEMMs and what is added to them, rounded once, whatever it is."""
    multiply = torch.mm

    def widened(a, b, *, out, out_dtype=None):
        """What torch.mm does on GPUs: the CPU's has no `out_dtype`."""
        assert out_dtype in (None, out.dtype)
        return multiply(a.to(out.dtype), b.to(out.dtype), out=out)

    torch.mm = widened
    compute = TorchDeviceCompute()
    for dtype in DTYPES:
        for rows, cols in ((9, 13), (1, 5), (40, 600)):
            a, b = torch.randn(rows, 7).to(dtype), torch.randn(7, cols).to(dtype)
            came = torch.randn(rows + 2, cols + 3).to(dtype)[1 : rows + 1, 2 : cols + 2]
            bias = torch.randn(1, cols).to(dtype)
            for add in ([], [came], [bias], [came, bias]):
                whole = torch.full((rows + 1, cols + 2), torch.nan, dtype=dtype)
                compute.gemm(a, b, whole[:rows, :cols], False, add)
                want = a.double() @ b.double() + sum(term.double() for term in add)
                rounded(want, whole[:rows, :cols], f"{dtype} {rows}x{cols} and {len(add)}")
                assert whole[rows:].isnan().all() and whole[:, cols:].isnan().all()


def exactly() -> None:
    """Products of repeated calls do not sum in 16 bits, and leave the user's setting as it was."""
    setting, seen = torch.backends.cuda.matmul, list[bool]()
    names = {
        "float16": "allow_fp16_reduced_precision_reduction",
        "bfloat16": "allow_bf16_reduced_precision_reduction",
    }
    multiply = torch.mm

    def noted(a, b, *, out):
        if out.shape[0] == 2:
            raise RuntimeError("refused")
        seen.extend(bool(getattr(setting, name)) for name in names.values())
        return multiply(a, b, out=out)

    torch.mm = noted
    compute = TorchDeviceCompute()
    for dtype in ("float32", *names):
        multiply_into, setting_of = compute.product(dtype)
        step = Step(multiply_into, (0, 1), out=2, setting=setting_of)
        product, kind = CallSteps(3, [], [step], []).run, getattr(torch, dtype)
        a, b, c = (torch.ones(3, 3, dtype=kind) for _ in range(3))
        for allowed in (True, False):
            for name in names.values():
                setattr(setting, name, allowed)
            seen.clear()
            product((a, b, c))
            assert (c == 3).all()
            wanted = [allowed and other != dtype for other in names]
            assert seen == wanted, (dtype, allowed, seen)
            try:
                product((a[:2], b, c[:2]))
            except RuntimeError as error:
                assert str(error) == "refused"
            else:
                raise AssertionError("the error of torch.mm was lost")
            left = [bool(getattr(setting, name)) for name in names.values()]
            assert left == [allowed, allowed], (dtype, left)


if __name__ == "__main__":
    torch.manual_seed(1)
    make_ready()
    {"summing": summing, "products": products, "exactly": exactly}[sys.argv[1]]()
    print("right")
