"""Runs all ranks of a plan's JSON under a seeded random interleaving: the tests' oracle.

Written from schedules/plan.schema.json alone, it shares nothing with the lowering or the verifier.
Moving and computing take two events, between which what they write is NaN. A window turns to NaN
when its rank says that it is done with it. All values are whole, so that sums are exact.
"""

import json
import random

import numpy as np

Array = np.ndarray
Events = type(None for _ in ())  # a generator of None, or of the flag without which it cannot go on
FIELDS = {"wait": "waits", "signal": "signals", "clear": "clears"}  # what a step's words are for


class Wrong(Exception):  # noqa: N818
    """What a plan did wrong, and where."""


def same(array: Array, shape: tuple[int, ...]) -> Array:
    if array.shape != shape:
        raise ValueError(f"{array.shape} where {shape} belongs")
    return array


def bags(table: Array, indices: Array, offsets: Array) -> Array:
    index, ends = indices[0].astype(int), np.append(offsets, indices.size).astype(int)
    sums = [table[index[ends[i] : ends[i + 1]]].sum(axis=0) for i in range(offsets.size)]
    return np.array(sums).reshape(offsets.size, table.shape[1])


def cut(array: Array, lengths: list[int], i: int) -> Array:
    return array[sum(lengths[:i]) : sum(lengths[: i + 1])]


def values(problem: dict, shapes: dict, rng: np.random.Generator) -> dict[tuple, Array]:
    """Random inputs of a call, and its outputs straight from the problem, by rank and name."""
    op, rows, ranks = problem["op"], problem["rows"], range(problem["world"])
    found = {key: rng.integers(-9, 10, shape).astype(float) for key, shape in shapes.items()}
    x, w = ([found.get((r, name)) for r in ranks] for name in "xw")
    if op == "all_gather_matmul":
        for r, i, out in ((r, i, out) for r in ranks for i, out in enumerate(problem["outputs"])):
            a, b = np.concatenate(x), found[r, out["operand"]]
            a = a.T if out.get("axis") == "contraction" else a
            y = a @ (b.T if out.get("operand_transposed") else b)
            found[r, f"y{i}"] = y + found[r, f"bias{i}"] if out.get("bias") else y
        return found
    if op == "embedding_all_to_all":
        y = np.zeros((sum(rows), 0))
        for r, i, size in ((r, *table) for r in ranks for table in enumerate(problem["tables"][r])):
            index, begins = found[r, f"indices{i}"], found[r, f"offsets{i}"]
            index[...] = rng.integers(0, max(1, size), index.shape)
            low = 0 if size else index.size  # bags of an empty table are empty
            begins[...] = np.sort(rng.integers(low, index.size + 1, begins.shape))
            y = np.append(y, bags(found[r, f"table{i}"], index, begins), axis=1)
    elif op in ("matmul_reduce_scatter", "matmul_all_reduce"):
        y = np.sum([x[s] @ w[s] for s in ranks], axis=0)
    for r in ranks:
        if op in ("all_to_all_matmul", "matmul_all_to_all"):
            blocks, late = [cut(x[s], problem["splits"][s], r) for s in ranks], op.startswith("all")
            y = np.concatenate([blocks[s] @ w[r if late else s] for s in ranks])
        found[r, "y0"] = cut(y, rows, r) if op in SLICED else y
    return found


def work(step: dict, part: dict, see: object, rank: int, met: dict) -> None:
    """Brings what a part reads, or its products, to where it belongs."""
    for product in part.get("products", ()):
        a, b, c = (see(product[name]) for name in "abc")
        total = (a.T if step.get("transpose_a") else a) @ (b.T if step.get("transpose_b") else b)
        for region in [product["c"]] * product.get("accumulate", 0) + product.get("add", []):
            term = see(region)
            total = total + same(term, (1 if len(term) == 1 else len(c), c.shape[1]))
        c[...] = same(total, c.shape)
    if step["kind"] == "gemm":
        return
    moved = [see(region) for region in part["reads"]]
    if step["kind"] == "reduce":
        moved = [sum(same(term, moved[0].shape) for term in moved)]
    elif step["kind"] == "bag":  # .base is all of the offsets: the last bag ends where the next begins
        moved = [bags(*moved[:2], moved[2].base)[slice(*part["reads"][2]["cols"])]]
    elif step["kind"] == "collective":
        sent = [met[s] for s in sorted(met)]
        gather = step["collective"] == "all_gather"
        moved = [np.concatenate([some[0] for some in sent])] if gather else [some[rank] for some in sent]
    for region, array in zip(part["writes"], moved, strict=True):
        see(region)[...] = same(array, see(region).shape)


class Run:
    """The lanes of all ranks, memory, and flags: words (of 5 fields) that are 1, and what ended."""

    def __init__(self, plan: dict, seed: int, calls: int, in_order: bool) -> None:
        self.rng, numbers, self.in_order = random.Random(seed), np.random.default_rng(seed), in_order
        self.steps, self.roles, self.blank = {}, {}, {}
        for rank in sorted(plan["ranks"], key=lambda rank: rank["rank"]): 
            self.steps[rank["rank"]] = [step | {FIELDS.get(step["kind"], "words"): step.get("words", ())} for step in rank["steps"]]
            for buffer in rank["buffers"]:
                key = (rank["rank"], buffer["name"])
                self.roles[key], self.blank[key] = buffer["role"], np.full((buffer["rows"], buffer["cols"]), np.nan)
                
        copies = range(min([b.get("copies", 1) for rank in plan["ranks"] for b in rank["buffers"] if b["role"] == "window"], default=1))
        self.copies = [self.rng.sample(copies, len(copies)) for _ in range(calls)]
        given = {key: self.blank[key].shape for key, role in self.roles.items() if role in ("input", "weight")}
        self.values = [values(plan["problem"], given, numbers) for _ in range(calls)]
        # Windows by rank, name and copy; other buffers by rank, name and who may reach them.
        self.memory = {(*key, copy): self.blank[key].copy() for key, role in self.roles.items() if role == "window" for copy in copies}
        pairs = [(r, s) for r in self.steps for s in self.steps if r != s]
        self.at_rest = {(r, "free", s, 0, copy) for r, s in pairs for copy in copies}
        self.flags, self.waiting, self.at, self.met = set(self.at_rest), {}, {}, {}
        # Lanes are [priority, events, rank, flag at their end]; runs differ in how unfair they are.
        levels = ((1, 2, 4, 12), (0, 1, 5), (0, 0.02, 0.3), (0, 0.5, 1))
        self.keen, apart, self.moods, self.late = map(self.rng.choice, levels)
        self.bias, self.ready = [self.rng.random() * apart for _ in self.steps], []
        for r in self.steps:
            self.fork(r, {("rank", r): self.call(r, 0)})

    def fork(self, rank: int, lanes: dict[tuple, Events]) -> Events:
        self.ready += [[self.rng.random() + self.bias[rank], lanes[end], rank, end] for end in lanes]
        return self.until(*lanes)

    def until(self, *flags: tuple) -> Events:
        for flag in flags:
            while flag not in self.flags:
                yield flag

    def set(self, flag: tuple) -> None:
        self.flags.add(flag)
        self.ready += self.waiting.pop(flag, ())

    def run(self) -> int:
        while self.ready:
            lane = max(self.rng.choices(self.ready, k=self.keen))
            self.here = f"rank {lane[2]}, {self.at.get(lane[3])}"
            flag = next(lane[1], lane)
            if self.rng.random() < self.moods:
                lane[0] = self.rng.random() + self.bias[lane[2]]
            if flag is not None:
                self.ready.remove(lane)
                self.set(lane[3]) if flag is lane else self.waiting.setdefault(flag, []).append(lane)
        stuck = [f"{self.at.get(x[3])} for {flag}" for flag, lanes in self.waiting.items() for x in lanes]
        words = sorted({flag for flag in self.flags if len(flag) == 5} ^ self.at_rest)
        if stuck or words:
            raise Wrong(f"stuck: {stuck}; words not at rest: {words}")
        return sum(map(len, self.steps.values())) * len(self.values)

    def call(self, rank: int, number: int) -> Events:
        known, copies, steps = self.values[number], self.copies[number], self.steps[rank]
        mine = {name: role for (owner, name), role in self.roles.items() if owner == rank and role != "window"}

        def see(region: dict) -> Array:
            owner, name, copy = region["rank"], region["buffer"], copies[region.get("copy", 0)]
            array = self.memory[owner, name, rank if name in mine else copy]
            (top, bottom), (left, right) = region["rows"], region["cols"]
            return same(array[top:bottom, left:right], (bottom - top, right - left))

        def word(some: dict, side: str) -> tuple:
            if some[side] != rank:
                raise ValueError(f"{some} is not this rank's")
            copy = copies[some.get("copy", 0)]
            return (some["rank"], some["name"], some["peer"], some.get("chunk", 0), copy)

        def play(step: dict, part: dict) -> Events:
            yield from self.until(*(word(some, "rank") for some in part.get("waits", ())))
            results = part.get("writes", []) + [product["c"] for product in part.get("products", ())]
            targets, met, meeting = [see(region) for region in results], {}, []
            if step["kind"] == "collective":
                index = [s["id"] for s in steps if s["kind"] == "collective"].index(step["id"])
                meeting = [("met", number, index, step["collective"])]
                met = self.met.setdefault(meeting[0], {})
                met[rank] = [see(region).copy() for region in step["reads"]]
                if len(met) == len(self.steps):
                    self.set(meeting[0])
            late = met or self.rng.random() < self.late
            if not late:
                work(step, part, see, rank, met)
            kept = [target.copy() for target in targets]
            for target in targets:
                target.fill(np.nan)
            if targets:
                yield None
            yield from self.until(*meeting)
            for target, old in zip(targets, kept, strict=True):
                target[...] = old
            if late:
                work(step, part, see, rank, met)
            for some in part.get("signals", ()):
                flag = word(some, "rank" if some["name"] == "ready" else "peer")
                if flag in self.flags:
                    raise ValueError(f"{flag} is raised twice")
                if some["name"] == "free" and ...
                    poison
                self.set(flag)
                yield None
            self.flags.difference_update(word(some, "rank") for some in part.get("clears", ()))

        def lane(name: str, end: tuple) -> Events:
            for step in (step for step in steps if name in ("", step["lane"])):
                self.at[end] = step["id"]
                yield from self.until(*((rank, number, other) for other in step.get("after", ())))
                parts = enumerate(step.get("parts") or [step])
                plays = {(rank, number, step["id"], i): play(step, part) for i, part in parts}
                if self.in_order or len(plays) == 1:
                    for events in plays.values():
                        yield from events
                else:
                    yield from self.fork(rank, plays)
                self.set((rank, number, step["id"]))
                yield None

        for name, role in mine.items():
            source = known if role in ("input", "weight") else self.blank
            self.memory[rank, name, rank] = source[rank, name].copy()
        names = [""] if self.in_order else dict.fromkeys(step["lane"] for step in steps)
        ends = ...
        yield from self.fork(rank, {(rank, number, "lane", name): lane(name, ) for name in names})
        for name, role in mine.items():
            if role != "workspace" and not np.array_equal(self.memory[rank, name, rank], known[rank, name]):
                raise Wrong(f"{name} is wrong")
        if number + 1 < len(self.values):
            yield from self.call(rank, number + 1)


def interpret(plan: str | dict, seed: int, calls: int = 3, in_order: bool = False) -> int:
    """Runs calls of a plan with no barrier between them; returns how many steps it ran."""
    run = Run(json.loads(plan) if isinstance(plan, str) else plan, seed, calls, in_order)
    try:
        with np.errstate(invalid="ignore"):
            return run.run()
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise Wrong(f"{run.here}: {error!r}") from error
