"""Kernels of experts on a GPU, against float64; repeated calls give equal bits."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from experts_cases import Case, spread  # noqa: E402 - after torch is known to be there

pytestmark = pytest.mark.timeout(300)
TOKENS = (700, 0, 333, 991)  # of each rank
EXPERTS, TOPK = 6, 4


def ids_of(kind: str) -> torch.Tensor:
    ids = spread(sum(TOKENS), TOPK, EXPERTS * len(TOKENS), "cuda")
    if kind == "one":
        ids[:] = EXPERTS + 1
    if kind == "few":  # empty experts, wrong ids, and no experts
        ids = torch.where(ids % 5 == 0, -1, ids // 3 * 3)
        ids[7, 2] = EXPERTS * len(TOKENS) + 3
    return ids.int().contiguous()


@pytest.mark.parametrize("kind", ["even", "one", "few"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(256, 512), (200, 520), (72, 40)])
def test_products(shared_gpus: int, kind: str, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    case = Case(ids_of(kind), TOKENS, EXPERTS, *sizes, dtype, scale=sizes[0] ** -0.5)
    for rank in range(len(TOKENS)):
        count = len(case.wanted_list(rank)[0])
        for turned, waves, capacity in (
            (False, (0,), count + 130), (True, (1, 2), count), (False, (2, 1), max(count - 1, 1))
        ):  # fmt: skip
            torch.manual_seed(3)
            first = case.multiply(rank, capacity, turned, waves)
            torch.manual_seed(3)
            again = case.multiply(rank, capacity, turned, waves)
            assert torch.equal(first.view(torch.int16), again.view(torch.int16))


@pytest.mark.parametrize("kind", ["even", "one", "few"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("d", [512, 200])
def test_returned_sums(shared_gpus: int, kind: str, turned: bool, d: int) -> None:
    case = Case(ids_of(kind), TOKENS, EXPERTS, d, 384, scale=d**-0.5)
    counts = [len(case.wanted_list(rank)[0]) for rank in range(len(TOKENS))]
    for beyond in (3, -1):
        case.give_back([max(count + beyond, 0) for count in counts], turned)


@pytest.mark.parametrize("kind", ["even", "one", "few"])
@pytest.mark.parametrize("indexed", [(True, False), (False, True), (False, False), (True, True)])
@pytest.mark.parametrize("sizes", [(256, 512), (200, 72)])
def test_gradients(
    shared_gpus: int, kind: str, indexed: tuple[bool, bool], sizes: tuple[int, int]
) -> None:
    case = Case(ids_of(kind), TOKENS, EXPERTS, *sizes)
    for rank in (0, 1, 3):
        count = len(case.wanted_list(rank)[0])
        for capacity in (count + 2, max(count - 1, 1)):
            case.differentiate(rank, capacity, *indexed)


@pytest.mark.parametrize("tokens, topk, experts", [((16384, 16384), 8, 64), ((9, 8), 1, 1024)])
def test_lists(shared_gpus: int, tokens: tuple[int, ...], topk: int, experts: int) -> None:
    case = Case(spread(sum(tokens), topk, 2 * experts, "cuda"), tokens, experts, 16, 16)
    for rank in range(2):
        case.listed(rank)


def test_graphs(shared_gpus: int) -> None:
    case = Case(ids_of("even"), TOKENS, EXPERTS, 256, 512, scale=1 / 16)
    rows, (x, gathered) = case.listed(0), case.parts(0)
    from ficco.kernels import experts

    w, y = case.random(EXPERTS, 256, 512), case.nan(4000, 512)
    experts.grouped(rows, x, gathered, w, y)
    graph, wanted = torch.cuda.CUDAGraph(), y.clone()
    with torch.cuda.graph(graph):
        experts.grouped(rows, x, gathered, w, y)
    y.zero_()
    graph.replay()
    assert torch.equal(y, wanted)
