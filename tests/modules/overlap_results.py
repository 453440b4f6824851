"""Checks of what overlapped models compute: as without ficco, and as float64 does.

A rank runs them: see `overlap_worker.py`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import ficco
from ficco.api import functions
from ficco.operators import OPERATORS

sys.path.insert(0, str(Path(__file__).parent))
from llama import VOCABULARY, Llama, each_gathers, plain, sequence

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


def model(layers: int = 1) -> Llama:
    torch.manual_seed(0)
    return Llama(layers, bias=True)


def tokens(seed: int, batch: int = BATCH, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


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
        for batch, length in ((BATCH, LENGTH), (1, LENGTH))[: 2 if mesh.size() == 2 else 1]:
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
            ficco.restore(net)
            assert torch.equal(net(words), was), f"{about}, restored"


# Linear layers call these; experts have a module of their own.
FUNCTIONS = tuple(n for n in (*OPERATORS, "column_matmul") if hasattr(functions, n))


class Counted:
    """Counts calls of ficco's functions, by name, while it is entered."""

    def __enter__(self) -> dict[str, int]:
        self.calls: dict[str, int] = {}
        self.kept = {name: getattr(functions, name) for name in FUNCTIONS}
        for name, function in self.kept.items():
            setattr(functions, name, self._counting(name, function))
        return self.calls

    def _counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **named: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            return function(*args, **named)

        return counting

    def __exit__(self, *error: object) -> None:
        for name, function in self.kept.items():
            setattr(functions, name, function)


class Crossing(nn.Module):
    """Its q reads x; its k and v read the memory, which may be written between them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 8, bias=False) for _ in range(3))
        self.writes = False

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        q = self.q(x)
        k = self.k(memory)
        if self.writes:
            with torch.no_grad():
                memory.mul_(2)
        return torch.cat([q, k, self.v(memory)], -1)


def guesses(mesh: DeviceMesh) -> None:
    """Layers that read other inputs, or one that was written in between, are computed alone."""
    torch.manual_seed(0)
    net = Crossing()
    exact = copy.deepcopy(net)
    parallelize_module(net, mesh, {n: ColwiseParallel(output_layouts=Replicate()) for n in "qkv"})
    ficco.overlap(net)
    for turn in range(4):
        x, memory = (torch.randn(3, 6, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
        net.writes = exact.writes = turn == 3
        with Counted() as calls:
            y = net(x, memory.clone())
        close(y, exact(x, memory.clone()), f"crossing, turn {turn}")
        if turn < 3:  # autograd refuses what was written
            grads = torch.autograd.grad(y.sum(), list(net.parameters()))
            wanted = torch.autograd.grad(exact(x, memory).sum(), list(exact.parameters()))
            for mine, right in zip(grads, wanted, strict=True):
                close(whole(mine), right, f"crossing, gradients, turn {turn}")
        assert calls == {"column_matmul": 3 if turn == 3 else 2}, (turn, calls)
        told = ficco.explain(net)
        assert ("computed alone" in told) == (turn > 0) and ("{k, v}" in told) == (turn > 0), told


def sharing(mesh: DeviceMesh) -> None:
    """One call for q, k, v and one for gate, up; nothing is held after the parent's forward."""
    net = ficco.overlap(sequence(model(2), mesh))
    words = tokens(1)
    block = net.layers[0]
    assert "if they read the same input" in ficco.explain(net)
    for _ in range(2):
        with Counted() as calls:
            net(words)
        assert calls == {"all_gather_matmul": 5, "matmul_reduce_scatter": 4}, calls
    told = ficco.explain(net)
    for text in (
        "{wq, wk, wv} (2 layers)",
        "which read the same",
        "embedding",
        "15 of 15",
        "serial",
    ):
        assert text in told, f"{text!r} is not in {told}"
    seen: list[Any] = []
    hook = block.mlp.gate.register_forward_pre_hook(lambda _, x: seen.append(weakref.ref(x[0])))
    with torch.no_grad():
        net(words)
    gc.collect()
    assert len(seen) == 1 and seen[0]() is None, "the gathered layers' input is held"
    hook.remove()

    def fails(*_: Any) -> None:
        raise KeyError("stop")

    hook = block.attention.wk.register_forward_pre_hook(fails)
    with contextlib.suppress(KeyError):
        net(words)
    waiting = block.attention.wq.__dict__["_ficco_layer"].sharing
    assert waiting._x is None and not any(waiting._waiting), "results wait after an error"
    hook.remove()
    with Counted() as calls:
        net(words)
    assert calls["all_gather_matmul"] == 5, calls
    with torch.inference_mode():  # nothing counts how often a tensor is written there
        y = net(words)
    assert "torch.inference_mode" in ficco.explain(net)
    close(y, net(words), "inference mode")
    assert "torch.inference_mode" not in ficco.explain(net)
    with torch.inference_mode():
        given = distribute_tensor(torch.randn(4, 6), mesh, [Replicate()])
    styles = {"k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel()}
    with torch.no_grad():
        wanted = parallelize_module(Cache(), mesh, dict(styles))(given)
        net = ficco.overlap(parallelize_module(Cache(), mesh, dict(styles)))
        close(net(given), wanted, "a DTensor of an inference tensor")


class Cache(torch.nn.Module):
    """Layers that read alike, called by forward or by other methods; forward may write between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.k, self.v, self.o = (torch.nn.Linear(a, b) for a, b in ((6, 8), (6, 8), (8, 6)))
        self.write: Any = lambda x: None

    def keys(self, x: Any) -> Any:
        return self.o(self.k(x))

    def values(self, x: Any) -> Any:
        return self.o(self.v(x))

    def forward(self, x: Any) -> Any:
        k = self.k(x)
        self.write(x)
        return self.o(k * self.v(x))


def apart(mesh: DeviceMesh) -> None:
    """Nothing waits outside of the parent's forward, and nothing stale is taken within."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    styles = {"k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel()}
    plainly = parallelize_module(Cache(), mesh, dict(styles))
    net = ficco.overlap(parallelize_module(Cache(), mesh, dict(styles)))
    for _ in range(2):
        with Counted() as calls:
            close(net(x), plainly(x), "keys and values in one forward")
        assert calls["column_matmul"] == 1, calls
        with Counted() as calls:
            for part in ("keys", "values"):
                y, wanted = getattr(net, part)(x), getattr(plainly, part)(x)
                close(y, wanted, part)
                y.sum().backward()
        assert calls["column_matmul"] == 2, calls
    assert "where no forward of" in ficco.explain(net)
    waiting = net.k.__dict__["_ficco_layer"].sharing
    assert waiting._x is None, "a result waits outside of forward"
    y = checkpoint(net, x.requires_grad_(), use_reentrant=False)
    net.keys(x)  # before the second run of that forward
    y.sum().backward()
    assert "where no forward of" not in ficco.explain(net)
    again = functools.partial(checkpoint, net.forward, use_reentrant=False)
    for _ in range(2):  # its forward without the parent's hooks, and once more in backward
        again(x).sum().backward()
    x = x.detach()

    def write(x: Any) -> None:  # a DTensor's own version stays
        x.to_local().mul_(2)

    def reduce(x: Any) -> None:  # of which PyTorch counts nothing
        torch.distributed.all_reduce(x)

    for how, many in ((write, 2), (reduce, 2)):
        net = parallelize_module(Cache(), mesh, dict(styles))
        net = ficco.overlap(net, share=how is write)
        net.write = plainly.write = how
        for _ in range(2):
            given = [x.clone(), x.clone()]
            if how is write:
                given = [distribute_tensor(each, mesh, [Replicate()]) for each in given]
            with torch.no_grad(), Counted() as calls:
                close(net(given[0]), plainly(given[1]), f"written by {how.__name__}")
            assert calls["column_matmul"] == many, (how, calls)


def checkpoints(mesh: DeviceMesh) -> None:
    words = tokens(2)
    wanted = gradients(sequence(model(), mesh), words)
    for reentrant in (False, True):
        for part in ("block", "attention"):
            net = ficco.overlap(sequence(model(), mesh))
            for block in net.layers:
                inner = block if part == "block" else block.attention
                again = functools.partial(checkpoint, inner.forward, use_reentrant=reentrant)
                inner.forward = again
            for turn in range(2):
                for key, found in gradients(net, words).items():
                    about = f"checkpoint {part}, reentrant {reentrant}, turn {turn}, {key}"
                    close(whole(found), whole(wanted[key]), about)
    torch.manual_seed(0)
    net = Crossing()
    parallelize_module(net, mesh, {name: ColwiseParallel() for name in "qkv"})
    x, memory = torch.randn(3, 6, requires_grad=True), torch.randn(3, 6)
    wanted_x = torch.autograd.grad(net(x, memory).sum(), x)[0]
    ficco.overlap(net)
    for _ in range(3):  # first with a wrong guess, that its second run repeats
        y = checkpoint(net, x, memory, use_reentrant=False)
        close(torch.autograd.grad(y.sum(), x)[0], wanted_x, "checkpoint of a wrong guess")


def training(mesh: DeviceMesh) -> None:
    """200 steps from equal seeds: the losses of one process without ficco."""
    torch.manual_seed(0)
    one = Llama(layers=1)
    nets = [one, ficco.overlap(plain(copy.deepcopy(one), mesh))]
    losses: list[list[float]] = [[], []]
    for net, kept in zip(nets, losses, strict=True):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for step in range(200):
            optimizer.zero_grad()
            loss = loss_of(net, tokens(step % 7, 2, 4))
            loss.backward()
            optimizer.step()
            kept.append(loss.item())
    assert losses[0][-1] < losses[0][0] / 2, "nothing was learnt"
    for step, (was, now) in enumerate(zip(*losses, strict=True)):
        assert abs(was - now) <= 1e-5 * was, f"step {step}: {now}, not {was}"


CHECKS = {
    "forms": forms, "guesses": guesses, "sharing": sharing, "apart": apart,
    "checkpoints": checkpoints,
    "training": training,
}  # fmt: skip
