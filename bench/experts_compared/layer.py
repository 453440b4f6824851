"""The operands of a point on this rank, and what they give, in float64.

Everything is drawn from seeds that name the shape and the rank or expert. So each rank can draw the
operands of another one, and a check needs no collective.
"""

from __future__ import annotations

import math
import zlib

import torch

from experts_compared import routing as routings
from experts_compared.points import SETS, Point, Shape

__all__ = ["Layer", "relative_error"]

Tensor = torch.Tensor
ROTATED_BYTES, LEAST_LAYERS = 240_000_000, 2  # weights that calls use in turn
CHECKED = 8  # tokens of a rank that are compared


def _seeded(device: torch.device, *about: object) -> torch.Generator:
    seed = zlib.crc32(" ".join(map(str, about)).encode())
    return torch.Generator(device).manual_seed(seed)


class Weights:
    """Weights of several layers of a shape, as models store them: [e, 2 f, d] and [e, d, f]."""

    def __init__(self, shape: Shape, rank: int, world: int, kind: torch.dtype, device: str) -> None:
        self.shape, self.kind, self.device = shape, kind, torch.device(device)
        self.e = shape.experts_of_rank(world)
        bytes_of_layer = 3 * self.e * shape.d * shape.f * kind.itemsize
        self.layers = max(LEAST_LAYERS, -(-ROTATED_BYTES // bytes_of_layer))
        self.layers = min(self.layers, SETS)
        own = range(rank * self.e, (rank + 1) * self.e)
        pairs = [[self.expert(layer, expert) for expert in own] for layer in range(self.layers)]
        self.w_in = [torch.stack([w for w, _ in pair]).transpose(1, 2) for pair in pairs]
        self.w_out = [torch.stack([w for _, w in pair]).transpose(1, 2) for pair in pairs]

    def expert(self, layer: int, expert: int) -> tuple[Tensor, Tensor]:
        """Return the weights [2 f, d] and [d, f] of an expert of any rank."""
        shape = self.shape
        draw = _seeded(self.device, shape.name, layer, expert)
        about = {"dtype": self.kind, "device": self.device, "generator": draw}
        w_in = torch.randn(2 * shape.f, shape.d, **about) * shape.d**-0.5  # type: ignore[call-overload]
        w_out = torch.randn(shape.d, shape.f, **about) * shape.f**-0.5  # type: ignore[call-overload]
        return w_in, w_out


class Layer:
    """The operands of a point. The i-th call uses the i-th routing and the i-th layer's weights.

    Attributes:
        ids, gates: of each call; calls read these, and `turn` puts other routings into them.
        capacity: rows for which a rank makes room; no routing needs as many.
        imbalance: see `routings.imbalance`.
    """

    def __init__(self, point: Point, weights: Weights, rank: int, world: int) -> None:
        self.point, self.weights, self.rank, self.world = point, weights, rank, world
        self.shape, self.e = point.shape, weights.e
        self.experts = self.e * world
        self.x = self.tokens_of(rank)
        self.dy = self.tokens_of(rank + world)
        self._drawn = [self.routing(number, rank) for number in range(SETS)]
        self.ids = [ids.clone() for ids, _ in self._drawn]
        self.gates = [gates.clone() for _, gates in self._drawn]
        self.turned = 0
        found = [routings.imbalance(self._counts(number), world) for number in range(SETS)]
        self.imbalance = routings.summed_up(found)
        self.capacity = routings.capacity_of(self.imbalance["most_rows"])
        self._wanted: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def tokens_of(self, rank: int) -> Tensor:
        """Return the tokens of a rank."""
        about = {"dtype": self.weights.kind, "device": self.weights.device}
        draw = _seeded(self.weights.device, "x", self.point.tokens, rank)
        return torch.randn(self.point.tokens, self.shape.d, generator=draw, **about)  # type: ignore[call-overload, no-any-return]

    def routing(self, number: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return a routing of a rank's tokens: experts and gates."""
        draw = _seeded(self.weights.device, "ids", number, rank)
        shape, point = self.shape, self.point
        return routings.draw(point.tokens, self.experts, shape.topk, point.routing, draw)

    def _counts(self, number: int) -> Tensor:
        every = [self.routing(number, rank)[0] for rank in range(self.world)]
        return routings.counts(torch.cat(every), self.experts)

    def turn(self, by: int) -> None:
        """Let the i-th call have the routing of call i + by: copied into the same tensors."""
        self.turned = by
        for i in range(SETS):
            ids, gates = self._drawn[(i + by) % SETS]
            self.ids[i].copy_(ids)
            self.gates[i].copy_(gates)

    def w(self, i: int) -> tuple[Tensor, Tensor]:
        """Return the weights of the i-th call."""
        layer = i % self.weights.layers
        return self.weights.w_in[layer], self.weights.w_out[layer]

    def checked(self) -> list[int]:
        """Return the tokens that are compared: the first ones and the last ones."""
        tokens = self.point.tokens
        half = CHECKED // 2
        return list(range(tokens)) if tokens <= CHECKED else [
            *range(half), *range(tokens - half, tokens)
        ]  # fmt: skip

    def wanted(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows of the i-th call's result, and of its gradients of x and gates, in float64.

        The gradients are those of the sum of the result times `dy`.
        """
        layer, number = i % self.weights.layers, (i + self.turned) % SETS
        if (layer, number) not in self._wanted:
            self._wanted[layer, number] = self._exact(layer, number)
        return self._wanted[layer, number]

    def _exact(self, layer: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
        tokens = self.checked()
        ids, gates = (each[tokens] for each in self._drawn[number])
        x = self.x[tokens].double().requires_grad_()
        gates = gates.double().requires_grad_()
        with torch.enable_grad():
            found = []
            for expert in sorted(set(ids.flatten().tolist())):
                w_in, w_out = (w.double() for w in self.weights.expert(layer, expert))
                at, slot = torch.nonzero(ids == expert, as_tuple=True)
                gate, up = (x[at] @ w_in.t()).chunk(2, 1)
                row = (torch.nn.functional.silu(gate) * up) @ w_out.t()
                found.append(torch.zeros_like(x).index_add(0, at, row * gates[at, slot, None]))
            y = torch.stack(found).sum(0)
            dx, dgates = torch.autograd.grad(y, (x, gates), self.dy[tokens].double())
        return y.detach(), dx, dgates

    def weight_gradients(self, i: int) -> tuple[Tensor, Tensor]:
        """Return the gradients [d, 2 f] and [f, d] of this rank's first expert, in float64."""
        layer, number = i % self.weights.layers, (i + self.turned) % SETS
        expert = self.rank * self.e
        pair = self.weights.expert(layer, expert)
        w_in, w_out = (w.double().t().requires_grad_() for w in pair)
        with torch.enable_grad():
            total = w_in.sum() * 0 + w_out.sum() * 0
            for rank in range(self.world):
                ids, gates = self.routing(number, rank)
                at, slot = torch.nonzero(ids == expert, as_tuple=True)
                gate, up = (self.tokens_of(rank)[at].double() @ w_in).chunk(2, 1)
                row = (torch.nn.functional.silu(gate) * up) @ w_out * gates[at, slot, None].double()
                total = total + (row * self.tokens_of(rank + self.world)[at].double()).sum()
            return torch.autograd.grad(total, (w_in, w_out))  # type: ignore[return-value]


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Return the largest relative error of a row, by 2-norms; infinite if one is NaN."""
    gap = (found.double() - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-30)
    worst = float(gap.max())
    return math.inf if math.isnan(worst) else worst
