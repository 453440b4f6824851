"""Runs all ranks of a plan's JSON under a seeded random interleaving: the tests' oracle.

Written from schedules/plan.schema.json alone; it shares nothing with the lowering or the verifier.
A step that moves or computes takes two events, between which what it writes is NaN. A window turns
to NaN when its rank says that it is done with it. Values are whole, so that sums are exact.
"""

import json
import random

import numpy as np

Array = np.ndarray
Events = type(None for _ in ())  # A generator of None, or of the flag without which it cannot go on
FIELDS = {"wait": "waits", "signal": "signals", "clear": "clears"}  # what a step's words are for
BROKEN = (AttributeError, LookupError, TypeError, ValueError)  # how a plan without sense shows


class Wrong(Exception):  # noqa: N818
    """What a plan did wrong, and where."""


def same(array: Array, shape: tuple[int, ...]) -> Array:
    if array.shape != shape:
        raise Wrong(f"{array.shape} where {shape} belongs")
    return array


def bags(table: Array, indices: Array, offsets: Array, first: int, last: int) -> Array:
    index, ends = indices.ravel().astype(int), np.append(offsets, indices.size).astype(int)
    sums = [table[index[ends[bag] : ends[bag + 1]]].sum(axis=0) for bag in range(first, last)]
    return np.array(sums).reshape(last - first, table.shape[1])


def values(problem: dict, sizes: list[dict], rng: np.random.Generator) -> list[dict[str, Array]]:
    """Random inputs of a call and its outputs, straight from the problem, by rank and buffer."""
    op, rows, k, outputs = (problem[name] for name in ("op", "rows", "k", "outputs"))
    ranks, m, n = range(problem["world"]), sum(rows), outputs[0]["columns"][0]
    found: list[dict[str, Array]] = [{} for _ in ranks]

    def given(rank: int, name: str, *shape: int, low: int = -9, high: int = 10) -> Array:
        return found[rank].setdefault(name, rng.integers(low, high, shape).astype(float))

    if op == "all_gather_matmul":
        x = np.concatenate([given(r, "x", rows[r], k) for r in ranks])
        for r, i, out in ((r, i, out) for r in ranks for i, out in enumerate(outputs)):
            a, n = x.T if out.get("axis") == "contraction" else x, out["columns"][r]
            turned = out.get("operand_transposed")
            w = given(r, out["operand"], *((n, a.shape[1]) if turned else (a.shape[1], n)))
            bias = given(r, f"bias{i}", 1, n) if out.get("bias") else 0.0
            found[r][f"y{i}"] = a @ (w.T if turned else w) + bias
    elif op == "embedding_all_to_all":
        parts = [np.zeros((m, 0))]
        for r, i, size in ((r, i, size) for r in ranks for i, size in enumerate(problem["tables"][r])):
            count = sizes[r][f"indices{i}"][1]
            index = given(r, f"indices{i}", 1, count, high=max(1, size), low=0)
            ends = given(r, f"offsets{i}", 1, m, low=0 if size else count, high=count + 1)
            ends.sort()  # the bags of an empty table are empty
            parts.append(bags(given(r, f"table{i}", size, n), index, ends, 0, m))
        for r in ranks:
            found[r]["y0"] = np.concatenate(parts, 1)[sum(rows[:r]) : sum(rows[: r + 1])]
    else:
        depths, splits = problem.get("depths") or [k for _ in ranks], problem.get("splits")
        for r, s in ((r, s) for r in ranks for s in ranks):
            x = given(s, "x", rows[s] if splits else m, depths[s])
            split, there = splits[s] if splits else rows, r if op == "all_to_all_matmul" else s
            block = x[sum(split[:r]) : sum(split[: r + 1])] if op != "matmul_all_reduce" else x
            y = block @ given(there, "w", depths[there], n)
            y0 = found[r].setdefault("y0", y[:0] if splits else np.zeros(y.shape))
            found[r]["y0"] = np.concatenate([y0, y]) if splits else y0 + y
    return found


class Run:
    """Memory, flags (of 5 fields: raised words; others: what has ended), and who waits for them."""

    def __init__(self, plan: dict, seed: int, calls: int, in_order: bool) -> None:
        self.rng, draw, self.in_order = random.Random(seed), np.random.default_rng(seed), in_order
        everyone = range(plan["problem"]["world"])
        self.steps = [rank["steps"] for rank in plan["ranks"]]
        self.buffers = [{b["name"]: b for b in plan["ranks"][r]["buffers"]} for r in everyone]
        sizes = [{b["name"]: (b["rows"], b["cols"]) for b in rank["buffers"]} for rank in plan["ranks"]]
        windows = [b for b in plan["ranks"][0]["buffers"] if b["role"] == "window"]
        copies = range(min([window.get("copies", 1) for window in windows], default=1))
        self.copies = [self.rng.sample(copies, len(copies)) for _ in range(calls)]
        self.values = [values(plan["problem"], sizes, draw) for _ in range(calls)]
        homes = [(r, copy) for r in everyone for copy in copies]
        self.at_rest = {(r, "free", s, 0, copy) for r, copy in homes for s in everyone if s != r}
        self.windows = {(r, b["name"], copy): np.full(sizes[r][b["name"]], np.nan) for r, copy in homes for b in windows}
        self.own: list[dict[tuple, Array]] = [{} for _ in everyone]
        self.flags, self.waiting, self.at, self.posted = {*self.at_rest}, {}, {}, {}
        # An actor is [priority, events, rank, flag that it ends with]; runs differ in unfairness.
        levels = ((1, 2, 4, 12), (0, 1, 5), (0, 0.02, 0.3), (0, 0.5, 1))
        self.keen, apart, self.moods, self.late = map(self.rng.choice, levels)
        self.bias, self.ready = [self.rng.random() * apart for _ in everyone], []
        for r in everyone:
            self.spawn(r, ("rank", r), self.all_calls(r))

    def spawn(self, rank: int, end: tuple, events: Events) -> tuple:
        self.ready.append([self.rng.random() + self.bias[rank], events, rank, end])
        return end

    def until(self, *flags: tuple) -> Events:
        for flag in flags:
            while flag not in self.flags:
                yield flag

    def set(self, flag: tuple) -> None:
        self.flags.add(flag)
        self.ready.extend(self.waiting.pop(flag, ()))

    def run(self) -> int:
        while self.ready:
            actor = max(self.rng.choices(self.ready, k=self.keen))
            try:
                flag = next(actor[1], actor)
            except (Wrong, *BROKEN) as error:
                raise Wrong(f"rank {actor[2]}, {self.at.get(actor[3])}: {error!r}") from error
            if self.rng.random() < self.moods:
                actor[0] = self.rng.random() + self.bias[actor[2]]
            if flag is actor:
                self.set(actor[3])
            elif flag is not None:
                self.waiting.setdefault(flag, []).append(actor)
            if flag is not None:
                self.ready.remove(actor)
        stuck = [f"{self.at.get(a[3])} for {flag}" for flag, some in self.waiting.items() for a in some]
        wrong = sorted({flag for flag in self.flags if len(flag) == 5} ^ self.at_rest)
        if stuck or wrong:
            raise Wrong(f"stuck: {stuck}; words not at rest: {wrong}")
        return sum(map(len, self.steps)) * len(self.values)

    def all_calls(self, rank: int) -> Events:
        own, steps, buffers = self.own[rank], self.steps[rank], self.buffers[rank]
        lanes = [""] if self.in_order else dict.fromkeys(step["lane"] for step in steps)
        for call, known in enumerate(self.values):
            for name, buffer in buffers.items():
                shape = (buffer["rows"], buffer["cols"])
                if buffer["role"] in ("input", "weight"):
                    own[rank, name] = same(known[rank][name], shape)
                    own[rank, name].flags.writeable = False
                elif role != "window":
                    own[rank, name] = np.full(shape, np.nan)
            ends = {lane: ("lane", rank, call, lane) for lane in lanes}
            for lane, end in ends.items():
                self.spawn(rank, end, self.lane(rank, call, lane, end))
            yield from self.until(*ends.values())
            for name, buffer in buffers.items():
                if buffer["role"] == "output" and not np.array_equal(own[rank, name], known[rank][name]):
                    raise Wrong(f"{name} of call {call} is wrong")

    def lane(self, rank: int, call: int, lane: str, end: tuple) -> Events:
        for step in self.steps[rank]:
            if lane not in ("", step["lane"]):
                continue
            self.at[end] = step["id"]
            yield from self.until(*(("step", rank, call, name) for name in step.get("after", ())))
            parts = step.get("parts") or [{**step, FIELDS.get(step["kind"], "words"): step.get("words", ())}]
            runs = [self.part(rank, call, step, part) for part in parts]
            for i, events in enumerate(runs):
                if len(parts) == 1 or self.in_order:
                    yield from events
                else:
                    runs[i] = self.spawn(rank, ("part", rank, call, (step["id"], i)), events)
            yield from self.until(*(run for run in runs if isinstance(run, tuple)))
            self.set(("step", rank, call, step["id"]))
            yield None

    def part(self, rank: int, call: int, step: dict, part: dict) -> Events:
        yield from self.until(*(self.word(rank, call, word, "rank") for word in part.get("waits", ())))
        regions = part.get("writes") or [product["c"] for product in part.get("products", ())]
        targets = [self.view(rank, call, region) for region in regions]
        if targets: 
            collective = step.get("collective")
            meeting
