"""Overlap a Hugging Face Llama: its own tensor-parallel plan, then one line of ficco.

torchrun --standalone --nproc-per-node 2 examples/overlap_llama.py [SCHEDULE]

It needs `transformers` and `accelerate`. The model is tiny and random, so nothing is downloaded.
Ranks use GPUs (NCCL) if each has one, else the CPU (gloo); hide GPUs by CUDA_VISIBLE_DEVICES="".
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import ficco

CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=4,
)  # fmt: skip
BATCH, LENGTH = 2, 16


def load(rank: int, world: int) -> LlamaForCausalLM:
    """Return the tensor-parallel model; a real program calls from_pretrained("owner/model")."""
    name = [""]
    if rank == 0:
        name[0] = tempfile.mkdtemp()
        torch.manual_seed(0)
        LlamaForCausalLM(CONFIG).save_pretrained(name[0])
    dist.broadcast_object_list(name, src=0)
    return LlamaForCausalLM.from_pretrained(
        name[0], distributed_config=DistributedConfig(tp_size=world)
    )


def main() -> None:
    """Compare the loss without and with ficco, then say what runs."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpus = torch.cuda.device_count() >= world
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")

    model = load(rank, world).to(device)
    words = torch.randint(256, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    words = words.to(device)  # equal on all ranks, as without ficco
    plain = model(words, labels=words).loss.item()

    ficco.overlap(model, schedule=sys.argv[1] if len(sys.argv) > 1 else "auto")  # the one line
    loss = model(words, labels=words).loss  # the first call chooses the schedules
    loss.backward()
    if rank == 0:
        print(f"loss without ficco {plain:.5f}, with ficco {loss.item():.5f}")
        print(ficco.explain(model))

    ficco.restore(model)  # the model is as it was
    ficco.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
