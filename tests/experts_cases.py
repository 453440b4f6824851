"""Calls of the kernels of experts, compared with float64: in Triton's interpreter, and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ficco.kernels import experts, experts_gradient
from ficco.kernels.experts_tiles import ExpertTile
from ficco.operators.routing import Routed

Tensor = torch.Tensor


@dataclass
class Case:
    """Tokens of some ranks and their experts. `ids`: [tokens of all ranks, slots]."""

    ids: Tensor
    tokens: Sequence[int]
    experts: int
    d: int
    n: int
    dtype: torch.dtype = torch.bfloat16
    tile: ExpertTile | None = None
    scale: float = 1.0
    x: Tensor = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(5)
        self.world, self.topk = len(self.tokens), self.ids.shape[1]
        self.bases = [sum(self.tokens[:i]) for i in range(self.world + 1)]
        self.device = self.ids.device
        self.x = self.random(self.bases[-1], self.d)

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=self.device) * scale).to(self.dtype)

    def nan(self, *shape: int) -> Tensor:
        return torch.full(shape, float("nan"), dtype=self.dtype, device=self.device)

    def own(self, rank: int) -> slice:
        return slice(self.bases[rank], self.bases[rank + 1])

    def wanted_list(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the slots of a rank's list, the ends of experts, and those of own slots."""
        flat = self.ids.flatten().long()
        slots = torch.arange(len(flat), device=self.device)
        local = flat - rank * self.experts
        own = self.own(rank)
        other = (slots < own.start * self.topk) | (slots >= own.stop * self.topk)
        bins = 2 * local + other
        mine = (local >= 0) & (local < self.experts)
        order = torch.argsort(bins[mine], stable=True)
        counts = torch.bincount(bins[mine], minlength=2 * self.experts).cumsum(0)
        return slots[mine][order], counts[1::2], counts[0::2]

    def listed(self, rank: int) -> experts.Rows:
        """Run `route`, and compare all of its result."""
        own, slots = self.own(rank), self.ids.numel()
        sizes = Routed(self.experts, self.topk, tuple(self.tokens))
        garbage = {"dtype": torch.int32, "device": self.device}
        routing = torch.full((sizes.length(rank),), -77, **garbage)
        rows = experts.Rows.of(sizes, rank, routing)
        space = experts.workspace_size(slots, self.experts, self.world)
        experts.route(self.ids, torch.full((space,), 99, **garbage), rows, rank)
        listed, ends, own_ends = self.wanted_list(rank)
        flat = self.ids.flatten()
        wrong = torch.nonzero(flat >= self.experts * self.world).flatten().tolist()
        valid = flat[(flat >= 0) & (flat < self.experts * self.world)] // self.experts
        most = int(torch.bincount(valid, minlength=1).max())
        head = [len(listed), wrong[0] + 1 if wrong else 0, most, 0]
        past = torch.full((slots - len(listed),), -1, device=self.device)
        wanted = [torch.tensor(head, device=self.device), ends, own_ends]
        wanted += [self.ids[own].flatten(), listed, past]
        assert torch.equal(routing.long(), torch.cat([each.long() for each in wanted]))
        return rows

    def parts(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return own rows of x, and rows of all, of which own ones are NaN."""
        own, gathered = self.own(rank), self.x.clone()
        gathered[own] = float("nan")
        return self.x[own].clone(), gathered

    def close(self, found: Tensor, wanted: Tensor, magnitude: Tensor) -> None:
        """Compare with float64; magnitude: sums of the magnitudes of the terms."""
        eps = torch.finfo(self.dtype).eps
        assert torch.equal(found.isnan(), wanted.isnan())
        wrong = (found.double() - wanted).abs() > eps * wanted.abs() + 1e-5 * magnitude + 1e-6
        assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} elements are wrong"

    def products(self, rank: int, a: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows of a times the weights of their experts in float64, and magnitudes."""
        _, ends, _ = self.wanted_list(rank)
        sums, sizes, first = [], [], 0
        for expert, end in enumerate(ends.tolist()):
            rows, weight = a[first:end].double(), w[expert].double()
            sums.append(rows @ weight)
            sizes.append(rows.abs() @ weight.abs())
            first = end
        return torch.cat(sums), torch.cat(sizes)

    def multiply(self, rank: int, capacity: int, turned: bool, waves: Sequence[int]) -> Tensor:
        """Run `grouped` in waves, and compare; return y."""
        rows, (x, gathered) = self.listed(rank), self.parts(rank)
        w = self.random(self.experts, self.d, self.n, scale=self.scale)
        y = self.nan(capacity, self.n)
        given = w.transpose(1, 2).contiguous() if turned else w
        for wave in waves:
            experts.grouped(rows, x, gathered, given, y, turned, wave, self.tile)
        listed, _, _ = self.wanted_list(rank)
        wanted, sizes = self.products(rank, self.x[listed // self.topk], w)
        count = min(len(listed), capacity)
        self.close(y[:count], wanted[:count], sizes[:count])
        assert torch.equal(y[count:], torch.zeros_like(y[count:]))
        return y

    def give_back(self, capacity: Sequence[int], turned: bool) -> list[Tensor]:
        """Run `grouped_return` of all ranks, then `slot_sums`; compare; return the sums."""
        slots, count = self.ids.numel(), self.topk
        windows = [self.nan(tokens * count, self.n) for tokens in self.tokens]
        table = torch.tensor([[0] * self.world, [window.data_ptr() for window in windows]])
        bases = torch.tensor(self.bases, dtype=torch.int32)
        wanted = torch.zeros(slots, self.n, dtype=torch.float64, device=self.device)
        sizes, lists = torch.zeros_like(wanted), []
        for rank in range(self.world):
            rows, room = self.listed(rank), capacity[rank]
            listed, _, _ = self.wanted_list(rank)
            h = self.nan(room + 1, self.d)[:room]
            h[: len(listed)] = self.random(min(len(listed), room), self.d)
            w = self.random(self.experts, self.d, self.n, scale=self.scale)
            given = w.transpose(1, 2).contiguous() if turned else w
            experts.grouped_return(
                rows, h, given, windows[rank], table.to(self.device), bases.to(self.device), rank,
                1, turned, tile=self.tile,
            )  # fmt: skip
            whole = self.nan(len(listed), self.d)
            whole[:room] = h[: len(listed)]
            wanted[listed], sizes[listed] = self.products(rank, whole, w)
            lists.append((rows, listed))
        valid = (self.ids >= 0) & (self.ids < self.experts * self.world)
        returned = torch.cat(windows)
        self.close(returned[valid.flatten()], wanted[valid.flatten()], sizes[valid.flatten()])
        assert returned[~valid.flatten()].isnan().all(), "slots without experts were stored"
        return [self.add(rank, rows, windows[rank]) for rank, (rows, _) in enumerate(lists)]

    def add(self, rank: int, rows: experts.Rows, window: Tensor) -> Tensor:
        own = self.ids[self.own(rank)]
        y = self.nan(self.tokens[rank], self.n)
        experts.slot_sums(rows, window, y)
        terms = window.view(self.tokens[rank], self.topk, self.n).double()
        terms = torch.where((own >= 0)[:, :, None], terms, 0)
        terms[own >= self.experts * self.world] = float("nan")
        self.close(y, terms.sum(1), terms.abs().sum(1))
        return y

    def differentiate(self, rank: int, capacity: int, a_indexed: bool, b_indexed: bool) -> Tensor:
        """Run `weight_gradient`, and compare; return the gradient."""
        rows, (x, gathered) = self.listed(rank), self.parts(rank)
        listed, ends, _ = self.wanted_list(rank)
        by_row = self.x[listed // self.topk]

        def operand(indexed: bool, width: int) -> tuple[Tensor, Tensor | None, Tensor]:
            if indexed:
                return x, gathered, by_row
            a = self.nan(capacity + 1, width)[:capacity]
            a[: len(listed)] = self.random(min(len(listed), capacity), width)
            return a, None, a

        a, a_gathered, a_rows = operand(a_indexed, self.d)
        b, b_gathered, b_rows = operand(b_indexed, self.d if b_indexed else self.n)
        dw = self.nan(self.experts, a.shape[1], b.shape[1])
        experts_gradient.weight_gradient(
            rows, a, b, dw, a_gathered, b_gathered, a_indexed, b_indexed, self.tile
        )
        copy = self.nan(len(listed), self.d)
        experts_gradient.listed_rows(rows, x, gathered, copy)
        assert torch.equal(copy, by_row)
        first = 0
        for expert, end in enumerate(ends.tolist()):
            chosen = slice(first, end if a_indexed and b_indexed else min(end, capacity))
            left, right = a_rows[chosen].double().T, b_rows[chosen].double()
            self.close(dw[expert], left @ right, left.abs() @ right.abs())
            first = end
        return dw


def spread(total: int, topk: int, all_experts: int, device: Any = "cpu", seed: int = 1) -> Tensor:
    """Return ids of distinct random experts for each token."""
    source = torch.Generator().manual_seed(seed)
    order = torch.rand(total, all_experts, generator=source).argsort(1)
    return order[:, :topk].int().contiguous().to(device)
