"""Routings that a router could have made: uniform, or by Zipf's law; and how uneven they are."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["capacity_of", "draw", "imbalance"]

ROOM, STEP = 1.25, 128  # rows of a capacity over the most rows; it is a multiple of STEP


def draw(
    tokens: int, experts: int, topk: int, routing: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return distinct experts of each token, int64 [tokens, topk], and their gates, float32.

    Args:
        tokens: of one rank.
        experts: of all ranks.
        topk: slots of a token.
        routing: "uniform", or "zipf": the chance of an expert goes with 1 / (1 + its place), where
            places are a random permutation, the same on all ranks.
        generator: of the device on which the result is to be.
    """
    device = generator.device
    weights = torch.ones(experts, device=device)
    if routing == "zipf":
        places = torch.randperm(experts, generator=torch.Generator().manual_seed(experts))
        weights = 1 / (1 + places.to(device, torch.float32))
    noise = torch.rand(tokens, experts, device=device, generator=generator)
    scores = weights.log() - (-noise.clamp(1e-20, 1 - 1e-7).log()).log()  # Gumbel's: a draw
    ids = scores.topk(topk, 1).indices
    gates = 0.5 + torch.rand(tokens, topk, device=device, generator=generator)
    return ids, gates / gates.sum(1, keepdim=True)


def counts(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Return the rows of every expert."""
    return torch.bincount(ids.flatten(), minlength=experts)


def imbalance(rows: torch.Tensor, world: int) -> dict[str, float]:
    """Return the largest over the mean number of rows, per rank and per expert.

    Args:
        rows: rows of every expert, of all tokens.
        world: number of ranks.
    """
    by_rank = rows.view(world, -1).sum(1).float()
    return {
        "ranks": round(float(by_rank.max() / by_rank.mean()), 3),
        "experts": round(float(rows.max() / rows.float().mean()), 3),
        "most_rows": int(by_rank.max()),
    }


def capacity_of(most_rows: int) -> int:
    """Return a capacity that holds the rows of all routings with some room."""
    return -(-int(most_rows * ROOM + 1) // STEP) * STEP


def summed_up(found: list[dict[str, float]]) -> dict[str, Any]:
    """Return means of the imbalances of several routings, and the most rows of any."""
    mean = {
        name: round(sum(each[name] for each in found) / len(found), 3)
        for name in ("ranks", "experts")
    }
    return {**mean, "most_rows": max(each["most_rows"] for each in found)}
