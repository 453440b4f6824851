"""A rank that overlaps models and holds them against the same models without ficco, and float64.

python overlap_worker.py STORE RANK WORLD
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import ficco

sys.path.insert(0, str(Path(__file__).parent))
from llama import WORDS, Llama, each_gathers, plain, sequence

BATCH, LENGTH = 3, 8
FORMS: dict[str, Callable[..., Llama]] = {
    "plain": plain, "sequence": sequence, "each_gathers": each_gathers,
}  # fmt: skip


def refused(call: Callable[[], Any], words: str) -> None:
    try:
        call()
    except ficco.InputError as error:
        assert words in str(error), f"{words!r} is not in {error}"
    else:
        raise AssertionError(f"nothing was refused; {words!r} was expected")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def close(found: torch.Tensor, wanted: torch.Tensor, about: str, most: float = 2e-5) -> None:
    assert found.shape == wanted.shape, f"{about}: {list(found.shape)}, not {list(wanted.shape)}"
    gap = (found.double() - wanted.double()).abs().max().item()
    assert gap <= most * max(1.0, wanted.abs().max().item()), f"{about}: off by {gap}"


def model(seed: int = 0, bias: bool = True) -> Llama:
    torch.manual_seed(seed)
    return Llama(bias=bias)


def tokens(seed: int, batch: int = BATCH, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(WORDS, (batch, length), generator=torch.Generator().manual_seed(seed))


def loss_of(net: torch.nn.Module, words: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(net(words).flatten(0, 1), words.flatten())


def gradients(net: torch.nn.Module, words: torch.Tensor) -> dict[str, torch.Tensor]:
    net.zero_grad()
    loss_of(net, words).backward()
    return {name: parameter.grad for name, parameter in net.named_parameters()}


def forms(mesh: DeviceMesh) -> None:
    """Outputs and gradients equal those without ficco and those of one process in float64."""
    world = mesh.size()
    for name, parallel in FORMS.items():
        for batch, length in ((BATCH, LENGTH), (1, LENGTH)):
            words = tokens(1, batch, length)
            exact = model().double()
            wanted = exact(words)
            wanted_gradients = gradients(exact, words)
            before, net = parallel(model(), mesh), parallel(model(), mesh)
            was = before(words)
            was_gradients = gradients(before, words)
            keys = list(net.state_dict())
            assert ficco.overlap(net) is net
            assert list(net.state_dict()) == keys
            about = f"{name}, batch {batch}, {world} ranks"
            with torch.no_grad():
                close(net(words), wanted, f"{about}, no_grad")
            y = net(words)
            close(y, wanted, about)
            close(y, was, f"{about}, without ficco")
            assert y.stride() == was.stride(), about
            for key, found in gradients(net, words).items():
                close(whole(found), wanted_gradients[key], f"{about}, gradient of {key}")
                assert type(found) is type(was_gradients[key]), f"{about}, {key}"
                if isinstance(found, DTensor):
                    placements = was_gradients[key].placements
                    assert found.placements == placements, f"{about}, {key}: {found.placements}"
            told = ficco.explain(net)
            print(told) if dist.get_rank() == 0 else None
            ficco.restore(net)
            assert torch.equal(net(words), was), f"{about}, restored"


def main() -> None:
    store, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    mesh = init_device_mesh("cpu", (world,))
    forms(mesh)
    ficco.close()
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main()
