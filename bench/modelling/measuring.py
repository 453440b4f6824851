"""Measure one cell on a rank: prepare variants, check them, time them in turn."""

from __future__ import annotations

import gc
import math
import random
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from record import spread

import ficco
from ficco.measure import host_us
from ficco.measure.clock import beat, calls_for, device_ms
from ficco.measure.launching import Rendezvous
from modelling import cells
from modelling.cells import Cell
from modelling.llama import SIZES, Blocks, local, made, share_weights
from modelling.steps import SERVED, Results, Steps

TOLERANCE = {"bfloat16": 0.1, "float32": 1e-3}  # relative, 2-norms
STUCK_S = {False: 35.0, True: 150.0}  # a longer step ends its process; keys: compiled or not
NEEDED_S = {False: 8.0, True: 40.0}  # time to prepare a variant and to time the cell
LEAST_ROUNDS = 5
OF_GRAPH = {cells.TORCH_GRAPH: cells.TORCH, cells.FICCO_GRAPH: cells.FICCO}
Begun = Callable[[str, str], None]


class Refused(Exception):
    """The variant cannot run as its name says."""


@dataclass
class Way:
    """A prepared variant of a cell; a call runs a step."""

    call: Callable[[], Results]
    keep: Any = None
    facts: dict[str, Any] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)


class Place:
    """This rank, its device, and the models that it keeps across cells."""

    def __init__(self, rank: int, world: int, mesh: Any, rendezvous: Rendezvous) -> None:
        self.rank, self.world, self.mesh, self.rendezvous = rank, world, mesh, rendezvous
        self.device = mesh.device_type
        self.gpu = self.device == "cuda"
        self.dtype = torch.bfloat16 if self.gpu else torch.float32
        self._models: dict[Any, Blocks] = {}
        self._sized: set[tuple[Any, str]] = set()

    def open(self, timeout_s: float) -> None:
        """Reopen the group for a cell, so that its windows have the size that the cell needs."""
        if self.gpu:
            ficco.close(self.mesh)
            ficco.prepare(self.mesh, machine="cuda", timeout_s=timeout_s)
            self._sized.clear()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.gpu:
            torch.cuda.synchronize()

    def model(self, cell: Cell, variant: str) -> Blocks:
        """Return a variant's model; models of one size and form share weights."""
        key = (cell.model, cell.split, variant)
        if key not in self._models:
            model = made(SIZES[cell.model], self.mesh, cell.split, self.dtype)
            if variant != cells.TORCH:
                share_weights(model, self.model(cell, cells.TORCH))
            if variant in (cells.FICCO, cells.FICCO_COMPILED):
                ficco.overlap(model, self.mesh, strict=True)
            self._models[key] = model
        return self._models[key]

    def reserve(self, cell: Cell, variant: str) -> None:
        """Size windows for the cell, as callers that capture graphs or serve do."""
        if (cell.model, variant) not in self._sized:
            self._sized.add((cell.model, variant))
            model = self.model(cell, variant)
            ficco.reserve(model, cell.tokens, backward=cell.mode == "training")


class Measuring:
    """The measurement of a cell. All ranks make the same calls in the same order."""

    def __init__(self, cell: Cell, place: Place, begun: Begun, skipped: dict[str, str]) -> None:
        self.cell, self.place, self._begun = cell, place, begun
        self.steps = Steps(cell, place.rank, place.world, place.device, place.dtype)
        self.ways: dict[str, Way] = {}
        self.refused = {name: why for name, why in skipped.items() if name in cell.variants}
        self.wanted: Results = {}

    # ---- agreement of ranks

    def attempt(self, variant: str, action: Callable[[], Any]) -> bool:
        """Run an action that may fail; if it fails on any rank, drop the variant."""
        self._begun(self.cell.id, variant)
        beat(STUCK_S[variant in cells.COMPILED])
        reason = ""
        try:
            action()
            self.place.synchronize()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:1000]
        gathered = self.place.rendezvous.gather(float(bool(reason)))
        failed = [rank for rank, value in enumerate(gathered) if value]
        if not failed:
            return True
        self.refused[variant] = reason or f"failed on ranks {failed}"
        self.ways.pop(variant, None)
        self._revive()
        return False

    def _revive(self) -> None:
        """Make ficco's group usable again if a call on it failed; its graphs are dropped."""
        bad = 0.0
        try:
            ficco.synchronize(self.place.mesh)
        except Exception:
            bad = 1.0
        if max(self.place.rendezvous.gather(bad)):
            ficco.reset(self.place.mesh)
            if self.ways.pop(cells.FICCO_GRAPH, None):
                self.refused[cells.FICCO_GRAPH] = "its windows ended with another call that failed"

    # ---- one variant

    def ready(self, variant: str) -> None:
        """Warm up a variant, compare its results with PyTorch's, and record its memory."""
        if variant in self.refused:
            return
        if variant != cells.TORCH and not self.wanted:
            self.refused[variant] = f"{cells.TORCH} gave nothing to hold it against"
            return
        source = OF_GRAPH.get(variant)
        if source is not None and source not in self.ways:
            self.refused[variant] = f"{source} is not there"
            return
        made: list[Way] = []
        if not self.attempt(variant, lambda: made.append(self._make(variant))):
            return
        way, found = made[0], {}

        def check() -> None:
            results = way.call()
            self.place.synchronize()
            if variant == cells.TORCH:
                self.wanted.update({name: each.clone() for name, each in results.items()})
            found.update(self.steps.errors(results, self.wanted))

        if not self.attempt(variant, check):
            return
        rendezvous = self.place.rendezvous
        errors = {
            name: max(rendezvous.gather(math.inf if math.isnan(error) else error))
            for name, error in found.items()
        }
        worst = max(errors.values())
        way.facts["errors"] = {name: float(f"{error:.3g}") for name, error in errors.items()}
        if worst > TOLERANCE[str(self.place.dtype).removeprefix("torch.")]:
            self.refused[variant] = f"wrong: relative errors {way.facts['errors']}"
            return
        self.ways[variant] = way

    def _make(self, variant: str) -> Way:
        if variant in OF_GRAPH:
            return self._captured(variant)
        model, facts = self.place.model(self.cell, variant), {}
        if variant in (cells.FICCO, cells.FICCO_COMPILED):
            if self.place.gpu and (why := ficco.fallback_reason(self.place.mesh)):
                raise Refused(f"ficco would run plain torch.distributed: {why}")
            self.place.reserve(self.cell, variant)
        if variant in cells.COMPILED:
            self._compile(variant, model)
        warm = 3 if variant in cells.COMPILED or self.place.gpu else 1
        for _ in range(warm):
            self.steps.warm(model)
        self.place.synchronize()
        if variant == cells.TORCH_ASYNC and not _workspace_bytes(self.place.mesh):
            raise Refused("torch.compile fused nothing: no operator asked for symmetric memory")
        way = Way(self.steps.of(variant, model), facts=facts)
        self._note_memory(variant, model, way, way.call)
        return way

    def _compile(self, variant: str, model: Blocks) -> None:
        options: dict[str, Any] = {}
        if variant == cells.TORCH_ASYNC:
            if not self.place.gpu:
                raise Refused("PyTorch's symmetric memory needs GPUs")
            from torch.distributed import _symmetric_memory as symmetric

            with warnings.catch_warnings():
                # Documented as unnecessary, but without it the compiler's pass skips groups.
                warnings.simplefilter("ignore", FutureWarning)
                symmetric.enable_symm_mem_for_group(self.place.mesh.get_group().group_name)
            options["_micro_pipeline_tp"] = True
        if variant == cells.FICCO_COMPILED:
            self.steps.warm(model)  # shows which layers read the same tensor, so that they share it
        for block in model.layers:
            if block._compiled_call_impl is None:
                block.compile(fullgraph=True, dynamic=False, options=options)

    def _captured(self, variant: str) -> Way:
        if not self.place.gpu:
            raise Refused("CUDA graphs need GPUs")
        gpus: Any = torch.cuda
        model = self.place.model(self.cell, OF_GRAPH[variant])
        call = self.steps.of(variant, model)
        graph, results = gpus.CUDAGraph(), {}

        def capture() -> None:
            # On the stream on which the model ran before; other threads may query events.
            stream = gpus.current_stream()
            with gpus.graph(graph, stream=stream, capture_error_mode="thread_local"):
                results.update(call())

        gc.collect()
        gpus.synchronize()
        way = Way(lambda: results, keep=graph)
        self._note_memory(variant, model, way, capture)

        def replay() -> Results:
            graph.replay()
            return results

        for each in results.values():
            each.fill_(torch.nan)  # so that later contents are the replay's
        way.call = replay
        for _ in range(2):
            replay()
        return way

    def _note_memory(self, variant: str, model: Blocks, way: Way, call: Callable[[], Any]) -> None:
        """Make a call; record the bytes of weights, of its peak allocation, and of windows."""
        gpus: Any = torch.cuda
        if not self.place.gpu:
            call()
            return
        gpus.synchronize()
        before = gpus.memory_allocated()
        gpus.reset_peak_memory_stats()
        call()
        gpus.synchronize()
        held = [local(parameter) for parameter in model.parameters()]
        memory = {
            "weights": sum(each.numel() * each.element_size() for each in held),
            "step": gpus.max_memory_allocated() - before, "windows": 0,
        }  # fmt: skip
        if variant == cells.TORCH_ASYNC:
            memory["windows"] = _workspace_bytes(self.place.mesh)
        elif variant in (cells.FICCO, cells.FICCO_GRAPH, cells.FICCO_COMPILED):
            memory["windows"] = ficco.window_bytes(self.place.mesh) // self.place.world
        way.facts["memory_bytes"] = {**memory, "whole": sum(memory.values())}

    # ---- rounds

    def run(self, way: Way, calls: int) -> float:
        """Return milliseconds per step, for steps back to back."""
        self.place.rendezvous.gather()
        if not self.place.gpu:
            return host_us(way.call, calls) / 1e3
        if self.cell.mode != "serving":
            way.call()  # the stream must not be empty when the clock starts
        return device_ms(way.call, calls)

    def rounds(self, count: int, limit_s: float) -> None:
        """Time all variants round by round; a round's order is equal on all ranks."""
        calls, end = 1, time.time() + limit_s
        if self.cell.mode != "serving" and self.ways:
            first = next(iter(self.ways.values()))
            calls = calls_for(max(self.place.rendezvous.gather(self.run(first, 2))))
        for number in range(count + 1):
            late = self.place.rendezvous.gather(float(time.time() > end))[0]
            if late and number > LEAST_ROUNDS:
                break
            order = list(self.ways)
            random.Random(f"{self.cell.id} {number}").shuffle(order)
            for variant in order:
                found: list[float] = []
                way = self.ways.get(variant)
                if way is None or not self.attempt(
                    variant, lambda way=way, found=found: found.append(self.run(way, calls))
                ):
                    continue
                slowest = max(self.place.rendezvous.gather(found[0]))
                if number:
                    way.times.append(slowest)


def measure(
    cell: Cell,
    place: Place,
    begun: Begun,
    skipped: dict[str, str],
    rounds: int,
    limit_s: float,
    end: float,
) -> dict[str, Any]:
    """Return a cell's result, equal on all ranks except for memory. A collective call.

    Args:
        cell: the cell to measure.
        place: this rank.
        begun: receives the cell and the variant before each action that may fail.
        skipped: variants that are left out, and why.
        rounds: number of rounds.
        limit_s: time limit of the rounds; at least LEAST_ROUNDS run.
        end: deadline of the whole measurement, a value of time.time().
    """
    torch._dynamo.reset()
    run, begin = Measuring(cell, place, begun, skipped), time.time()
    for variant in cell.variants:
        needed = NEEDED_S[variant in cells.COMPILED]
        if place.rendezvous.gather(float(time.time() + needed > end))[0]:
            run.refused.setdefault(variant, "no time was left")
        else:
            run.ready(variant)
    prepared_s = time.time() - begin
    run.rounds(rounds, limit_s)
    explained = ""
    if cells.FICCO in run.ways:
        try:
            explained = str(ficco.explain(place.model(cell, cells.FICCO)))
        except Exception as error:  # informative only
            explained = f"{type(error).__name__}: {error}"[:1000]
    size = SIZES[cell.model]
    tokens, steps = float(cell.tokens), 1
    if cell.mode == "serving":
        # Two runs and a round precede the timed rounds.
        timed = range(3, 3 + max((len(way.times) for way in run.ways.values()), default=1))
        numbers = [m for number in timed for m in run.steps.lengths(number, 0)]
        tokens, steps = sum(numbers) / len(numbers), SERVED
    rows = {}
    for variant, way in run.ways.items():
        layer = [each / steps / size.layers for each in way.times]
        figures = spread(layer)
        rate = 1e3 * tokens / (figures["median"] * size.depth)
        rows[variant] = {"ms_per_layer": figures, "tokens_per_s": round(rate, 1), **way.facts}
    return {
        "cell": cell.id, "mode": cell.mode, "model": cell.model, "tokens": cell.tokens,
        "mean_tokens": round(tokens, 1), "layers": size.layers, "depth": size.depth,
        "part": cell.part, "variants": rows, "refused": run.refused, "explained": explained,
        "prepared_s": round(prepared_s, 1),
    }  # fmt: skip


def _workspace_bytes(mesh: Any) -> int:
    """Return the bytes of symmetric memory that PyTorch's fused operators allocated."""
    from torch.distributed import _symmetric_memory as symmetric

    held = symmetric._group_name_to_workspace_tensor.get(mesh.get_group().group_name)
    return 0 if held is None else held.numel() * held.element_size()
