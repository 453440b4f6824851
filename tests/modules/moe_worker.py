"""A rank of a mixture of experts, against one process with all experts in float64.

python moe_worker.py STORE RANK WORLD CHECK...
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from experts_reference import Layer, listed, moe, rows_of, swiglu
from joining import join_gloo
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import ficco

Tensor = torch.Tensor
D, F, K, E = 8, 6, 3, 2  # widths, slots of a token, experts of a rank
NAMES = ("x", "gates", "w_in", "w_out")


def drawn(world: int, rows: list[int], seed: int = 0, width: int = 2 * F) -> Layer:
    """Return the tensors of all ranks: some ids are -1, and some tokens have an expert twice."""
    torch.manual_seed(seed)
    m, experts = sum(rows), E * world
    ids = torch.randint(-1, experts, (m, K))
    if m:
        ids[0] = 0  # one expert three times
        ids[-1] = -1  # no expert
    return Layer(
        torch.randn(m, D), ids, torch.rand(m, K), torch.randn(experts, D, width),
        torch.randn(experts, F, D),
    )  # fmt: skip


def part(layer: Layer, rows: list[int], rank: int, dtype: torch.dtype = torch.float32) -> Layer:
    """Return this rank's tensors, as leaves."""
    tokens = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    mine = slice(rank * E, (rank + 1) * E)
    tensors = [layer.x[tokens], layer.gates[tokens], layer.w_in[mine], layer.w_out[mine]]
    x, gates, w_in, w_out = (t.to(dtype).clone().requires_grad_() for t in tensors)
    return Layer(x, layer.ids[tokens], gates, w_in, w_out)


def exact(layer: Layer, dy: Tensor, act: Callable[[Tensor], Tensor]) -> tuple[Tensor, Layer]:
    """Return the results of all tokens in float64, and leaves with their gradients."""
    leaves = [t.double().requires_grad_() for t in (layer.x, *layer[2:])]
    whole = Layer(leaves[0], layer.ids, *leaves[1:])
    y = moe(whole, act)
    y.backward(dy.double())
    return y, whole


def close(found: Tensor, wanted: Tensor, about: str, error: float = 2e-5) -> None:
    assert found.shape == wanted.shape, f"{about}: {list(found.shape)}, not {list(wanted.shape)}"
    if found.numel():
        gap = (found.double() - wanted.double()).abs().max().item()
        assert gap <= error * max(1.0, wanted.abs().max().item()), f"{about}: off by {gap}"


def compare(
    layer: Layer, rows: list[int], rank: int, call: Callable[..., Tensor], about: str,
    act: Callable[[Tensor], Tensor] = swiglu,
) -> None:  # fmt: skip
    """Compare results and gradients of a call with those of one process."""
    dy = torch.randn(sum(rows), D)
    y, whole = exact(layer, dy, act)
    tokens = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    own = part(layer, rows, rank)
    found = call(*own)
    close(found, y[tokens], about)
    found.backward(dy[tokens])
    for name in NAMES:
        tensor, exactly = getattr(own, name), getattr(whole, name).grad
        if exactly is None:
            exactly = torch.zeros_like(getattr(whole, name))
        experts = slice(rank * E, (rank + 1) * E)
        assert tensor.grad is not None, f"{about}: {name} has no gradient"
        place = experts if name.startswith("w") else tokens
        close(tensor.grad, exactly[place], f"{about}, {name}", 1e-4)


def values(rank: int, world: int) -> None:
    """Even and uneven rows, ranks and experts without any, weights stored transposed."""
    for rows in ([4] * world, [5, 0, 1, 3][:world], [0] * world):
        layer = drawn(world, rows, sum(rows))
        layer.ids[layer.ids == E * world - 1] = -1  # the last expert has no token
        for options in ({}, {"capacity": 64}):
            compare(
                layer, rows, rank, lambda *a: ficco.moe(*a, rows=rows, **options),  # noqa: B023
                f"rows {rows}, {options}",
            )  # fmt: skip
    rows = [3] * world
    layer = drawn(world, rows, 1)
    stored = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in layer[3:]]
    call = ficco.moe
    compare(Layer(*layer[:3], *stored), rows, rank, call, "stored transposed")
    one = layer._replace(ids=torch.full_like(layer.ids, E * world - 1))
    compare(one, rows, rank, call, "one expert gets all")
    none = layer._replace(ids=torch.full_like(layer.ids, -1))
    compare(none, rows, rank, call, "no expert gets any")


def activations(rank: int, world: int) -> None:
    """All activations by name, and a function; gates in the dtype of x; without gradients."""
    rows, nn = [4] * world, torch.nn.functional
    for name, act in (("silu", nn.silu), ("gelu", nn.gelu), ("relu", nn.relu)):
        layer = drawn(world, rows, 3, F)
        compare(layer, rows, rank, lambda *a: ficco.moe(*a, activation=name), name, act)  # noqa: B023
        compare(layer, rows, rank, lambda *a: ficco.moe(*a, activation=act), "function", act)  # noqa: B023
    layer = drawn(world, rows, 4)
    x, ids, gates, w_in, w_out = part(layer, rows, rank, torch.bfloat16)
    y = ficco.moe(x, ids, gates, w_in, w_out)
    again = ficco.moe(x, ids, gates.float(), w_in, w_out)
    assert y.dtype == torch.bfloat16 and torch.equal(y, again)
    with torch.no_grad():
        assert torch.equal(ficco.moe(x, ids, gates, w_in, w_out), y)
    with torch.autocast("cpu", torch.bfloat16):
        wide = [t.detach().float() for t in (x, gates, w_in, w_out)]
        y = ficco.moe(wide[0], ids, *wide[1:])
    close(y, again, "autocast", 0.05)
    exactly = moe(Layer(*[t.double() if t.is_floating_point() else t for t in layer]))
    close(y, exactly[rank * 4 : rank * 4 + 4], "bfloat16", 0.05)


def routed(rank: int, world: int) -> None:
    """The table, slot by slot; NaN of a token reaches no other."""
    for rows in ([4] * world, [5, 0, 1, 3][:world]):
        layer = drawn(world, rows, 7)
        own = part(layer, rows, rank)
        for dtype in (torch.int64, torch.int32, torch.int16):
            routing = ficco.route(own.ids.to(dtype), E * world, gates=own.gates, rows=rows)
            slots, ends = listed(layer.ids, rows, rank, E)
            unused = [-1] * (layer.ids.numel() - len(slots))
            assert routing.slots.tolist() == slots + unused, routing
            assert routing.ends.tolist() == ends and routing.count() == len(slots)
            assert torch.equal(routing.own_ids.long(), own.ids)
            assert routing.gates is not None and not routing.gates.storage_offset()  # aligned
            assert routing.table[2] == max(rows_of(layer.ids, E, world))
            assert torch.equal(routing.row_gates(len(slots)), layer.gates.flatten()[slots])
            assert not routing.row_gates(len(slots) + 40)[len(slots) :].any()
            first = sum(rows[:rank]) * K
            mine = range(first, first + rows[rank] * K)
            for end, own_end, begin in zip(
                ends, routing.own_ends.tolist(), [0, *ends], strict=False
            ):
                assert all((slots[i] in mine) == (i < own_end) for i in range(begin, end))
    rows = [4] * world
    layer = drawn(world, rows, 8)
    layer.x[1] = float("nan")
    own = part(layer, rows, rank)
    y = ficco.moe(own.x, *own[1:])
    y.sum().backward()
    wrong = y.isnan().any(1).nonzero().flatten().tolist()
    assert wrong == ([1] if rank == 0 and (layer.ids[1] >= 0).any() else []), wrong
    assert own.x.grad is not None and own.w_in.grad is not None
    wrong = own.x.grad.isnan().any(1).nonzero().flatten().tolist()
    assert wrong in ([], [1] if rank == 0 else []), wrong
    chosen = {int(e) - rank * E for e in layer.ids[1]}
    for expert, grad in enumerate(own.w_in.grad):
        assert expert in chosen or grad.isfinite().all(), expert


def capacity(rank: int, world: int) -> None:
    """Capacity met exactly, and exceeded by one row on one rank; a wrong id."""
    rows = [5, 2, 1, 3][:world]
    layer = drawn(world, rows, 11)
    counts = rows_of(layer.ids, E, world)
    full = max(range(world), key=lambda r: counts[r])
    own, exactly = part(layer, rows, rank), max(counts[rank], 1)
    y = ficco.moe(*own, rows=rows, capacity=exactly)
    close(y, ficco.moe(*own, rows=rows), "exact capacity")
    less = exactly - (rank == full)
    bad = ficco.moe(*own, rows=rows, capacity=less)
    lost = listed(layer.ids, rows, full, E)[0][-1] // K  # the token of the last row
    lost_here = lost - sum(rows[:rank])
    wrong = bad.isnan().any(1).nonzero().flatten().tolist()
    assert wrong == ([lost_here] if 0 <= lost_here < rows[rank] else []), (wrong, lost_here)
    told = refused(lambda: ficco.moe(*own, rows=rows))
    for words in (f"rank {full} got {counts[full]} rows", f"capacity was {counts[full] - 1}"):
        assert words in told, told
    close(ficco.moe(*own, rows=rows), y, "after an error")  # it is raised once
    ficco.moe(*own, rows=rows, capacity=less)
    assert "an earlier call" in refused(ficco.synchronize)

    last = world - 1
    if rank == last:
        own.ids[-1, 1] = E * world + 4
    told = refused(lambda: ficco.moe(*own, rows=rows))
    assert f"ids of rank {last} have expert" in told and f"token {rows[last] - 1}" in told, told
    bad = ficco.moe(*own, rows=rows, capacity=64)
    wrong = bad.isnan().any(1).nonzero().flatten().tolist()
    assert wrong == ([rows[rank] - 1] if rank == last else []), wrong
    told = refused(lambda: ficco.moe(*own, rows=rows, capacity=64))
    assert f"ids of rank {last} have expert {E * world + 4} at token" in told, told


class Toy(torch.nn.Module):
    """Experts as transformers has them, where all ranks hold the same tokens."""

    has_gate, has_bias, has_post_expert_norm, is_transposed = True, False, False, False

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(1)
        count = E * mesh.size()
        self.gate_up_proj = split(torch.randn(count, 2 * F, D), mesh)
        self.down_proj = split(torch.randn(count, D, F), mesh)
        self.act_fn, self._apply_gate = torch.nn.SiLU(), self._default_apply_gate
        self.config = SimpleNamespace(num_experts_per_tok=K)
        implementation = SimpleNamespace(ep_mesh=mesh, tp_mesh=mesh, num_local_experts=E)
        self.__dict__["forward"] = lambda *tensors: implementation  # which `overlap` replaces

    def _default_apply_gate(self, z: Tensor) -> Tensor:
        return swiglu(z)


def near(found: int, wanted: int) -> bool:
    """Return whether windows have a number of bytes, which is rounded up to pages."""
    return wanted <= found < wanted + (1 << 13)


def split(whole: Tensor, mesh: DeviceMesh) -> torch.nn.Parameter:
    return torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))


def reserved(rank: int, world: int) -> None:
    """Windows are sized for experts that overlap: by the formula of the docs, before any call."""
    ficco.close()
    net, tokens = torch.nn.Sequential(Toy(init_device_mesh("cpu", (world,)))), 2048 * world
    assert "is not overlapped" in refused(lambda: ficco.reserve(net, tokens))
    ficco.overlap(net)
    layer = drawn(world, [tokens], 29)
    results = []
    for backward in (False, True):
        sized = ficco.reserve(net, tokens, backward=backward)
        assert near(sized, (world > 1) * 2 * D * 4 * max(tokens, K * tokens // world)), sized
        for count in (tokens, 5, 1):
            y = net[0](layer.x[:count], layer.ids[:count], layer.gates[:count])
            results.append(y.detach())
            if backward:
                y.sum().backward()
        assert ficco.window_bytes() == sized * world, "windows grew"
        assert (net[0].down_proj.grad is not None) == backward
    for y, again in zip(results[:3], results[3:], strict=True):
        assert torch.equal(y, again) and y.isfinite().all()
    weights = [
        getattr(net[0], name).full_tensor().detach() for name in ("gate_up_proj", "down_proj")
    ]
    few = Layer(layer.x[:5], layer.ids[:5], layer.gates[:5], *[w.transpose(1, 2) for w in weights])
    close(results[1], moe(few), "experts of a module")
    copied = copy.deepcopy(net[0])
    with torch.no_grad():
        copied.down_proj.zero_()
    assert not copied(layer.x[:5], layer.ids[:5], layer.gates[:5]).any()
    assert net[0](layer.x[:5], layer.ids[:5], layer.gates[:5]).any()
    told = refused(lambda: ficco.reserve(net, 2**31 - 1))
    assert "tokens=2147483647: 0 would read and write" in told, told
    net[0].config = None
    told = refused(lambda: ficco.reserve(net, tokens))
    assert "0: its configuration does not say how many experts a token has" in told, told
    ficco.restore(net)


def limited(rank: int, world: int) -> None:
    """A call that needs more windows than the limit allows runs serial, with the same results."""
    rows = [300, 20, 200, 30][:world]
    layer = drawn(world, rows, 31)
    need = (world > 1) * 2 * D * 4 * max(sum(rows), K * max(rows))
    enough = need + (1 << 13)
    for limit in (0, need // 2, enough, None):
        ficco.close()
        ficco.limit_windows(limit)
        compare(layer, rows, rank, lambda *a: ficco.moe(*a, rows=rows), f"limit {limit}")
        have = ficco.window_bytes() // world
        if limit in (enough, None):
            assert near(have, need), (limit, have, need)
        else:
            assert have <= limit + 2048, (limit, have)
        small = drawn(world, [1] * world, 37)
        compare(small, [1] * world, rank, ficco.moe, f"one token, limit {limit}")
    ficco.close()
    ficco.limit_windows(None)


def refused(call: Callable[[], Any]) -> str:
    """Return the message of the InputError that a call raises on all ranks."""
    try:
        call()
    except ficco.InputError as error:
        dist.barrier()
        return str(error)
    raise AssertionError("no error")


def recomputed(rank: int, world: int) -> None:
    """Activation checkpoints: the same gradients."""
    rows = [4] * world

    def call(*own: Any) -> Tensor:
        result: Tensor = checkpoint(ficco.moe, *own, use_reentrant=False)
        return result

    compare(drawn(world, rows, 13), rows, rank, call, "checkpoint")


def compiled(rank: int, world: int) -> None:
    """torch.compile in one graph, which needs a capacity."""
    rows = [4] * world

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(*own: Any) -> Tensor:
        return ficco.moe(*own, capacity=40) * 1.0

    compare(drawn(world, rows, 17), rows, rank, call, "compiled")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def without(*own: Any) -> Tensor:
        return ficco.moe(*own)

    try:
        without(*part(drawn(world, rows), rows, rank))
    except Exception as error:
        assert "capacity is needed" in str(error), error
    else:
        raise AssertionError("no capacity")


def bad_input(rank: int, world: int) -> None:
    """Arguments that cannot be, on all ranks; the group stays usable."""
    rows = [3] * world
    x, ids, gates, w_in, w_out = part(drawn(world, rows, 19), rows, rank)
    five, many = torch.zeros(5, D, 2 * F), torch.zeros(1025, D, 2)
    for words, changed in (
        ("ids is [9]", {"ids": ids.flatten()}),
        ("ids is [3, 0]", {"ids": ids[:, :0]}),
        ("ids is torch.float32", {"ids": ids.float()}),
        ("ids: list found", {"ids": ids.tolist()}),
        ("ids has 2 rows, x has 3", {"ids": ids[:2]}),
        ("ids is on meta", {"ids": ids.to("meta")}),
        ("gates is [3, 1]", {"gates": gates[:, :1]}),
        ("gates is torch.int64", {"gates": ids}),
        ("gates: NoneType", {"gates": None}),
        ("gates is torch.float64", {"gates": gates.double()}),
        ("x is [3]", {"x": x[:, 0]}),
        ("w_in is torch.float64", {"w_in": w_in.double()}),
        ("w_in is on meta", {"w_in": w_in.to("meta")}),
        ("w_in is [2, 12, 8], x has 8 columns", {"w_in": w_in.transpose(1, 2)}),
        ("w_out is [2, 8, 6], x has 8 columns", {"w_out": w_out.transpose(1, 2)}),
        ("w_out has 2 experts, w_in has 5", {"w_in": five}),
        ("w_in has no experts", {"w_in": w_in[:0], "w_out": w_out[:0]}),
        ("needs w_in with 2 x 6", {"w_in": w_in[..., :-1]}),
        ("needs w_in with 1 x 6", {"activation": "relu"}),
        ("did you mean 'swiglu'", {"activation": "swigly"}),
        ("activation=3", {"activation": 3}),
        ("activation: it returned [", {"activation": lambda z: z}),
        ("schedule: 3 schedules found", {"schedule": ("serial",) * 3}),
        ("capacity (rows)=0", {"capacity": 0}),
        ("capacity (rows)=2.5", {"capacity": 2.5}),
        ("rows[", {"rows": [2] * world}),
        ("sizes found", {"rows": [3] * (world + 1)}),
        ("1 to 1024 is needed", {"w_in": many, "w_out": many[:, :1].new_zeros(1025, 1, D)}),
    ):
        given = {"x": x, "ids": ids, "gates": gates, "w_in": w_in, "w_out": w_out, **changed}
        told = refused(lambda: ficco.moe(**given))  # noqa: B023
        assert words in told, f"{words!r} is not in {told!r}"
    assert "has no gates" in refused(lambda: ficco.route(ids, E * world).row_gates(1))
    routing = ficco.route(ids, E * world, capacity=3 * K * world)
    told = refused(lambda: ficco.dispatch_matmul(x, routing, w_in, capacity=1))
    assert "capacity=1: the routing was made with capacity=" in told, told
    if world > 1:
        told = refused(lambda: ficco.route(ids, E * world, gates=gates.requires_grad_(rank > 0)))
        assert "rank 0 has 1 gates (1: given, 2: with a gradient) and rank 1 has 2" in told, told
        gates.requires_grad_(False)
        told = refused(lambda: ficco.route(ids, 2 * world - 1))
        assert "each rank needs equally many" in told, told
        told = refused(lambda: ficco.route(ids[:, : 2 + (rank > 0)], E * world))
        assert "rank 0 has 2 slots a token (k) and rank 1 has 3" in told, told
        told = refused(lambda: ficco.route(ids[: 2 + (rank > 0)], E * world))
        assert "pass the tokens of all ranks as rows=" in told, told
    ficco.moe(x, ids, gates, w_in, w_out)


def one_refuses(rank: int, world: int) -> None:
    """One rank passes what cannot be: the others learn it within a second or so."""
    rows = [3] * world
    own = part(drawn(world, rows, 23), rows, rank)
    ficco.moe(*own)
    dist.barrier()
    begin = time.monotonic()
    try:
        ficco.moe(*own, capacity=0 if rank == 0 else None)
    except ficco.FiccoError as error:
        kind = ficco.InputError if rank == 0 else ficco.EngineError
        assert isinstance(error, kind) and "capacity (rows)=0" in str(error), error
    else:
        raise AssertionError("no error")
    assert time.monotonic() - begin < 5
    dist.barrier()
    ficco.reset()
    ficco.moe(*own)


def differing(rank: int, world: int) -> None:
    """Ranks whose calls differ in slots, experts or the width of tokens: an error on all, soon."""
    rows = [3] * world
    x, ids, gates, w_in, w_out = part(drawn(world, rows, 41), rows, rank)
    wide = torch.ones(3, D + 1), torch.ones(E, D + 1, 2 * F), torch.ones(E, F, D + 1)
    calls: dict[str, tuple[Tensor, ...]] = {
        "slots a token": (x, ids[:, 1:], gates[:, 1:], w_in, w_out),
        "experts": (x, ids, gates, w_in[:1], w_out[:1]),
        "another call": (wide[0], ids, gates, *wide[1:]),
    }
    for name, others in calls.items():
        given = others if rank == world - 1 else (x, ids, gates, w_in, w_out)
        begin = time.monotonic()
        try:
            ficco.moe(*given, schedule=("two_waves", "push_sm"))
        except ficco.FiccoError as error:
            assert name in str(error), f"{name}: {error}"
        else:
            raise AssertionError(f"{name}: no error")
        assert time.monotonic() - begin < 5, name
        dist.barrier()
        ficco.reset()
        ficco.moe(x, ids, gates, w_in, w_out)


CHECKS = (
    values, activations, routed, capacity, recomputed, compiled, bad_input, reserved, limited,
    one_refuses, differing,
)  # fmt: skip


def main() -> None:
    store, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    join_gloo(store, rank, world)
    for check in CHECKS:
        if check.__name__ in sys.argv[4:]:
            begin = time.monotonic()
            check(rank, world)
            print(f"{check.__name__}: {time.monotonic() - begin:.1f} s", flush=True)
    ficco.close()
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main()
