"""Checks of overlap() where modules read what it changes: a parent's gathered input, weights.

A rank runs them: see `overlap_worker.py`.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    parallelize_module,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize

import ficco

sys.path.insert(0, str(Path(__file__).parent))
from llama import sequence
from overlap_results import Counted, close, gradients, model, refused, tokens, whole


def part(x: Any) -> Any:
    """Take a DTensor apart."""
    return x.to_local() if isinstance(x, DTensor) else x


def part_of(x: Any) -> Any:
    """Take a DTensor apart, by another function."""
    return part(x)


def scaled(x: Any) -> Any:
    """Take nothing apart."""
    return x * 2


class Up(nn.Module):
    """A column layer and something else that reads its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)


class ByItself(Up):
    def forward(self, x: Any) -> torch.Tensor:
        return self.up(x) * x.to_local().sum()


class InAComprehension(Up):
    def forward(self, x: Any) -> torch.Tensor:
        return self.up(x) * sum(each.to_local().sum() for each in (x,))


class Inside(Up):
    def forward(self, x: Any) -> torch.Tensor:
        def local(each: Any) -> Any:
            return each.to_local()

        return self.up(x) * local(x).sum()


class ByAFunction(Up):
    def forward(self, x: Any) -> torch.Tensor:
        return self.up(x) * part_of(x).sum()


class ByABase(ByItself):
    pass


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    def outer(self: Any, x: Any) -> Any:
        return forward(self, x)

    return outer


class Decorated(Up):
    @decorated
    def forward(self, x: Any) -> torch.Tensor:
        return self.up(x) * x.to_local().sum()


class Part(nn.Module):
    def forward(self, x: Any) -> Any:
        return part(x).sum()


class Sum(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.sum()


class InAChild(Up):
    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Sequential(Part())

    def forward(self, x: Any) -> torch.Tensor:
        return self.up(x) * self.deep(x)


class Prepared(Up):
    def __init__(self) -> None:
        super().__init__()
        self.sum = Sum()

    def forward(self, x: Any) -> torch.Tensor:
        return self.up(x) * self.sum(x)


class Taker:
    def __call__(self, x: Any) -> Any:
        return part(x)


PARTIAL = functools.partial(part)


class ByWhatItHolds(Up):
    def __init__(self, take: Any) -> None:
        super().__init__()
        self.take = take

    def forward(self, x: Any) -> torch.Tensor:
        return self.up(x) * self.take(x).sum()


class ByATable(Up):
    TABLE: ClassVar[dict[str, Any]] = {"part": part}

    def forward(self, x: Any) -> torch.Tensor:
        return self.up(x) * self.TABLE["part"](x).sum()


class ByAPartial(Up):
    def forward(self, x: Any) -> torch.Tensor:
        return self.up(x) * PARTIAL(x).sum()


def in_a_hook() -> Prepared:
    made = Prepared()
    made.sum.register_forward_pre_hook(lambda _, x: (part(x[0]),))
    return made


def patched() -> Prepared:
    made = Prepared()
    made.sum.forward = lambda x: part(x).sum()  # type: ignore[method-assign]
    return made


class Scored(Up):
    """Returns something that it makes of its input."""

    def forward(self, x: Any) -> Any:
        return self.up(x), x.mean(-1)


class Innocent(Up):
    def forward(self, x: Any) -> torch.Tensor:
        return self.up(scaled(x) if x.dim() == 3 else x)


def keeps_gather(mesh: DeviceMesh) -> None:
    """What takes DTensors apart gets its input whole."""
    reader = "takes DTensors apart by itself"
    for kind, said in (
        (ByItself, f"ByItself {reader}"), (InAComprehension, f"InAComprehension {reader}"),
        (Inside, f"Inside {reader}"), (ByAFunction, f"ByAFunction {reader}"),
        (ByABase, f"ByABase {reader}"), (Decorated, f"Decorated {reader}"),
        (InAChild, f"deep.0 (overlap_readers.Part) {reader}"),
        (Prepared, "sum (overlap_readers.Sum) also has a PrepareModuleInput"),
        (functools.partial(ByWhatItHolds, part), f"ByWhatItHolds {reader}"),
        (functools.partial(ByWhatItHolds, Taker()), f"ByWhatItHolds {reader}"),
        (functools.partial(ByWhatItHolds, PARTIAL), f"ByWhatItHolds {reader}"),
        (ByATable, f"ByATable {reader}"), (ByAPartial, f"ByAPartial {reader}"),
        (in_a_hook, f"Sum) {reader}"), (patched, f"Sum) {reader}"),
        (Scored, "its PrepareModuleOutput declares its output whole"), (Innocent, ""),
    ):  # fmt: skip
        torch.manual_seed(0)
        gather = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
        plan = {"0": gather, "0.up": ColwiseParallel()}
        if kind is Prepared:
            plan["0.sum"] = PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=True
            )
        net = parallelize_module(nn.Sequential(kind()), mesh, plan)
        if kind is Scored:
            whole_too = (Shard(-1), Replicate())
            style = PrepareModuleOutput(
                output_layouts=whole_too, desired_output_layouts=whole_too, use_local_output=True
            )
            parallelize_module(net, mesh, {"0": style})
        x = torch.randn(2, 6)
        was = net(x)
        if said:
            refused(lambda: ficco.overlap(net, strict=True), said)  # noqa: B023
        told = ficco.explain(ficco.overlap(net))
        assert ("keeps its gather" in told) == bool(said), told
        assert ("0 of 1" in told) == bool(said), told
        with Counted() as calls:
            pairs = zip(net(x), was, strict=True) if kind is Scored else [(net(x), was)]
            for y, wanted in pairs:
                close(y, wanted, said)
        assert bool(calls) == (not said), calls
        ficco.restore(net)


class Twice(nn.Module):
    """A weight that is made anew at every read."""

    def forward(self, weight: Any) -> Any:
        return weight * 2.0


def parametrized(mesh: DeviceMesh) -> None:
    """Layers whose weights do not stay do not share, on any rank, and are right."""
    net = sequence(model(), mesh)
    for name, layer in net.named_modules():
        if name.rpartition(".")[2] in ("wq", "wk", "wv", "gate"):
            kind = "bias" if layer.bias is not None else "weight"
            parametrize.register_parametrization(layer, kind, Twice())
    plain = copy.deepcopy(net)
    ficco.overlap(net)
    held, seen = list[torch.Tensor](), set[tuple[tuple[str, int], ...]]()
    for step in range(4):
        words = tokens(step)
        with Counted() as calls:
            found = gradients(net, words)
        seen.add(tuple(sorted(calls.items())))
        for key, wanted in gradients(plain, words).items():
            close(whole(found[key]), whole(wanted), f"parametrized, {key}")
        if mesh.get_local_rank() == 0:  # memory is given out otherwise here
            held += [torch.empty(24 + step, 24) for _ in range(step + 1)]
    assert len(seen) == 1, seen
    told = ficco.explain(net)
    for kind in ("weight", "bias"):
        assert f"its {kind} is recomputed at every read" in told, told
    assert "layers.0.mlp.{gate, up}" not in told, told


def brought(mesh: DeviceMesh) -> None:
    """Layers whose own hooks bring their weights and take them away, and a hook of one rank."""
    for away in ("zeros", "nothing"):
        net = sequence(model(), mesh)
        for name, layer in net.named_modules():
            if name.rpartition(".")[2] in ("wq", "wk", "gate", "up"):
                local: Any = layer.weight._local_tensor
                held = local.detach().clone()

                def bring(_: Any, x: Any, local: Any = local, held: Any = held) -> None:
                    local.data = held

                def take(
                    _: Any, x: Any, y: Any, local: Any = local, held: Any = held, away: str = away
                ) -> None:
                    local.data = torch.zeros_like(held) if away == "zeros" else torch.empty(0)

                layer.register_forward_pre_hook(bring, prepend=True)
                layer.register_forward_hook(take)
        plain = copy.deepcopy(net)
        ficco.overlap(net)
        with torch.no_grad():
            for step in range(3):
                close(net(tokens(step)), plain(tokens(step)), f"brought, {away}")
    net = sequence(model(), mesh)
    plain = copy.deepcopy(net)
    ficco.overlap(net)
    if mesh.get_local_rank() == 0:
        net.layers[0].attention.wk.register_forward_pre_hook(lambda *_: None)
    for step in range(2):
        with Counted() as calls:
            found = gradients(net, tokens(step))
        assert calls["all_gather_matmul"] == 3, calls
        for key, wanted in gradients(plain, tokens(step)).items():
            close(whole(found[key]), whole(wanted), f"a hook of one rank, {key}")


def traced(mesh: DeviceMesh) -> None:
    """A layer's first call may be a tracer's, who is not asked for values."""
    for trace in (make_fx, None, torch.jit.trace):
        torch.manual_seed(mesh.get_local_rank())
        net = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False))
        ficco.overlap(net, mesh, plan={"0": "colwise", "1": "rowwise"})
        x = torch.ones(2, 6)
        if trace is make_fx:
            code = str(make_fx(net)(x).code)
            assert "matmul_all_reduce" in code, code
        elif trace is None:
            with FakeTensorMode(allow_non_fake_inputs=True):
                assert net(x).shape == (2, 6)
        else:
            refused(lambda: torch.jit.trace(net, (x,)), "torch.jit.trace is active")  # noqa: B023
        assert net(x).shape == (2, 6)


CHECKS = {check.__name__: check for check in (keeps_gather, parametrized, brought, traced)}
