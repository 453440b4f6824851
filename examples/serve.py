"""Decode with a tensor-parallel model: eagerly, and by a CUDA graph if there is a GPU per rank.

torchrun --standalone --nproc-per-node 2 examples/serve.py
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ficco

BATCH, TOKENS, WORDS, WIDTH, HEADS, HIDDEN = 4, 32, 64, 64, 8, 192


class Decoder(nn.Module):
    """One block of a decoder. All it reads and writes stays on the device, in the same places."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        shape = (BATCH, HEADS // world, TOKENS, WIDTH // HEADS)  # this rank's heads
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(shape))
        self.register_buffer("tokens", torch.zeros(BATCH, 1, dtype=torch.long))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        """Take one token of each sequence, [batch, 1, width], and return logits of the next."""
        split = (-1, WIDTH // HEADS)
        q, k, v = (w(x).unflatten(-1, split).transpose(1, 2) for w in (self.q, self.k, self.v))
        self.keys.index_copy_(2, self.position, k)
        self.values.index_copy_(2, self.position, v)
        seen = torch.arange(TOKENS, device=x.device)[None] <= self.position
        y = nn.functional.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen)
        x = x + self.o(y.transpose(1, 2).flatten(-2))
        return self.head(x + self.mlp(x))

    @torch.no_grad()
    def step(self) -> None:
        """Replace the token of each sequence by the next one."""
        self.tokens.copy_(self(self.embed(self.tokens)).argmax(-1))
        self.position.add_(1)


def decode(model: Decoder, step: Callable[[], None]) -> tuple[list[int], float]:
    """Return the tokens of the first sequence, and milliseconds per token."""
    model.tokens.copy_(torch.arange(BATCH)[:, None])
    model.position.zero_()
    found, begin = [], time.perf_counter()
    for _ in range(TOKENS):
        step()
        found.append(int(model.tokens[0, 0]))  # waits for the device; a server sends the token
    return found, (time.perf_counter() - begin) / TOKENS * 1e3


def main() -> None:
    """Decode eagerly, then by a graph."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    kind = "cuda" if torch.cuda.device_count() >= world else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(rank)
    torch.manual_seed(0)  # equal weights on all ranks, before they are split
    model, mesh = Decoder(world).to(kind).eval(), init_device_mesh(kind, (world,))
    columns = {name: ColwiseParallel() for name in ("q", "k", "v", "mlp.0")}
    rows = {"o": RowwiseParallel(), "mlp.2": RowwiseParallel()}
    ficco.overlap(parallelize_module(model, mesh, columns | rows), strict=True)
    ficco.reserve(model, BATCH)  # windows do not grow, nor kernels load, in a capture

    decode(model, model.step)  # the first calls of every library come before a capture, too
    runs = {"eager": decode(model, model.step)}
    if kind == "cuda":
        dist.barrier()
        torch.cuda.synchronize()  # no rank's NCCL still runs when another rank captures
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            model.step()
        runs["by a CUDA graph"] = decode(model, graph.replay)
        ficco.synchronize()  # raises if a call has failed
        graph.reset()  # destroy_process_group waits for graphs that hold calls of NCCL
    elif rank == 0:
        print(f"no CUDA graph: {world} GPUs are needed, {torch.cuda.device_count()} found")
    if rank == 0:
        for how, (tokens, ms) in runs.items():
            print(f"{how}, on {kind}: {ms:.3f} ms a token, tokens {tokens[:8]}...")
        print(ficco.explain(model))
    ficco.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
