"""A rank that does without private names of PyTorch, a few at a time, and gets right results.

python private_worker.py DEVICE STORE RANK WORLD WHAT

WHAT is "core" for the names of ficco.core.private.torch_core, which functions are called without,
or "layers" for those of torch_layers, which a model is overlapped without. ficco binds the names
when it is imported, so that each few names take a process of their own. Names that stand together
in the source are never absent together, since one may be the other's fallback.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

from ficco.core.private import finding

SCHEDULES = ("shard_p2p",)
AT_ONCE = 4  # names that are absent together


def in_a_child(body: Callable[[], None]) -> bool:
    """Run a body in a forked process, and return whether it ended well."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def names_of(what: str, file: Path) -> list[str]:
    """Return the names that a module of ficco.core.private asks for; it is not imported here."""

    def ask() -> None:
        import ficco.core.private.torch_core

        if what == "layers":
            finding.ASKED[:] = ["torch:Tensor._version"]  # layers need this one of torch_core
            import ficco.core.private.torch_layers  # noqa: F401
        file.write_text("\n".join(finding.ASKED))

    assert in_a_child(ask)
    return file.read_text().split("\n")


def remove(names: list[str]) -> None:
    """Let names be absent for ficco; PyTorch itself still has them."""
    resolve, has_own = finding.resolve, finding.has_own_attribute

    def resolve_others(asked: str) -> Any:
        if asked in names:
            raise AttributeError(asked)
        return resolve(asked)

    def holds_others(instance: object, attribute: str) -> bool:
        absent = any(name.endswith(f"().{attribute}") for name in names)
        return not absent and has_own(instance, attribute)

    finding.resolve, finding.has_own_attribute = resolve_others, holds_others


def refused(call: Callable[[], Any], words: str) -> None:
    import ficco

    try:
        call()
    except ficco.InputError as error:
        assert words in str(error), f"{words!r} is not in {error}"
    else:
        raise AssertionError(f"nothing was refused; {words!r} was expected")


def call_functions(rank: int, world: int) -> None:
    """Every function and its gradients, and calls that modes, autocast or a compiler observe."""
    import gradient_worker as gradients
    import tracing_worker as tracing
    from tracing_worker import draw, same

    import ficco

    for check in (
        gradients.gathering, gradients.reducing, gradients.columns, gradients.exchanging,
        gradients.pooling,
    ):  # fmt: skip
        check(rank, world, schedules=SCHEDULES)
    gradients.changed_in_place(rank, world)
    tracing.recomputing(rank, world)
    x, w = draw(rank, 4, 6), draw(10 + rank, 6, 5)
    plain = ficco.all_gather_matmul(x, w)
    with torch.autocast("cpu", torch.bfloat16):
        y = ficco.all_gather_matmul(x.clone().requires_grad_(), w)
        assert y.dtype == torch.bfloat16
        assert torch.is_autocast_enabled("cpu"), "autocast was not enabled again"
        y.sum().backward()
    torch.testing.assert_close(y.float(), plain, atol=0.1, rtol=0.1)
    with FlopCounterMode(display=False) as counted:
        torch.testing.assert_close(ficco.all_gather_matmul(x, w), plain)
    assert counted.get_total_flops() == 2 * 4 * world * 6 * 5, "a mode has not seen the call"
    seen = []

    class Listening(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Listening():
        torch.testing.assert_close(ficco.all_gather_matmul(x, w), plain)
    assert any("all_gather_matmul" in each for each in seen), "a function mode has not seen it"
    gather = ficco.all_gather_matmul
    refused(lambda: torch.func.vmap(lambda t: gather(t, w))(draw(1, 2, 4, 6)), "torch.func")
    refused(lambda: torch.func.grad(lambda t: gather(t, w).sum())(x), "torch.func")
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        refused(lambda: gather(dual, w), "forward_ad")
        torch.testing.assert_close(gather(x, w), plain)
    refused(lambda: torch.jit.trace(lambda t: gather(t, w), x, check_trace=False), "torch.jit")
    group = dist.new_group(list(range(world)))
    gather(x, w, group=group)  # without names of groups, ficco knows those that it has served
    for own in (None, group):
        same(
            lambda x, w: gather(x, w, group=own),  # noqa: B023
            tracing.compiled(lambda x, w: gather(x, w, group=own)),  # noqa: B023
            x, w,
        )  # fmt: skip
    ficco.close(group)


def overlap_models(rank: int, world: int) -> None:
    """A model's outputs and gradients, by the styles of PyTorch, and by a plan of names."""
    import overlap_results
    from overlap_results import close, gradients, model, tokens

    import ficco

    mesh = init_device_mesh("cpu", (world,))
    overlap_results.forms(mesh)
    one, net, words = model(), model(), tokens(4)
    for name, dim in (("gate", 0), ("up", 0), ("down", 1)):
        weight = getattr(net.layers[0].mlp, name).weight
        weight.data = weight.data.chunk(world, dim)[rank].clone()
    plan = {"*.gate": "colwise", "*.up": "colwise", "*.down": "rowwise"}
    ficco.overlap(net, mesh, plan=plan, strict=True)
    close(net(words), one(words), "by plan")
    exact = gradients(one, words)["layers.0.mlp.gate.weight"]
    found = gradients(net, words)["layers.0.mlp.gate.weight"]
    close(found, exact.chunk(world)[rank], "by plan, gradient")


def main() -> None:
    """Be a rank: argv has the device, the store, the rank, the world, and which names."""
    store, rank, world, what = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    names = names_of(what, Path(f"{store}.names{rank}"))
    assert len(names) > 10, names
    if what == "core":  # what the compiler imports at first takes longer than all checks
        with torch.no_grad():  # a process that has threads of autograd cannot be forked
            torch.compile(torch.sin, backend="aot_eager")(torch.ones(2))
    wrong = []
    groups = -(-len(names) // AT_ONCE)
    for number in range(groups):
        absent = names[number::groups]

        def check() -> None:
            remove(absent)  # noqa: B023
            dist.init_process_group(
                "gloo", store=dist.FileStore(f"{store}.{number}", world), rank=rank,  # noqa: B023
                world_size=world, timeout=timedelta(seconds=60),
            )  # fmt: skip
            torch.set_num_threads(1)
            (call_functions if what == "core" else overlap_models)(rank, world)
            assert set(finding.ABSENT) == set(absent), finding.ABSENT  # noqa: B023
            import ficco

            ficco.close()
            dist.destroy_process_group()

        if not in_a_child(check):
            wrong.append(absent)
    assert not wrong, f"without these, ficco is not right: {wrong}"
    print("right")


if __name__ == "__main__":
    main()
