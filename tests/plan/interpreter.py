"""Runs all ranks of a plan's JSON under a seeded random interleaving: the tests' oracle.

Written from schedules/plan.schema.json alone; it shares nothing with the lowering or the verifier.
A step that moves or computes takes two events, between which what it writes is NaN. A window turns
to NaN when its rank says that it is done with it. Values are whole, so that sums are exact.
"""

import json
import random

import numpy as np

Array = np.ndarray
Events = type(None for _ in ())  # Generators that yield None, or the flag they cannot go on without.
BROKEN = (LookupError, TypeError, ValueError)  # How a plan that makes no sense shows.


class Wrong(Exception):  # noqa: N818
    """What a plan did wrong, and where."""


def same(array: Array, *shapes: tuple[int, ...]) -> Array:
    if array.shape not in shapes:
        raise Wrong(f"{array.shape} where {shapes[0]} belongs")
    return array


def bags(table: Array, indices: Array, offsets: Array, first: int, last: int) -> Array:
    index, ends = indices.ravel().astype(int), np.append(offsets, indices.size).astype(int)
    sums = [table[index[ends[bag] : ends[bag + 1]]].sum(axis=0) for bag in range(first, last)]
    return np.array(sums).reshape(last - first, table.shape[1])


def draw(rank: dict, problem: dict, rng: np.random.Generator) -> dict[str, Array]:
    buffers = [buffer for buffer in rank["buffers"] if buffer["role"] in ("input", "weight")]
    shapes = {buffer["name"]: (buffer["rows"], buffer["cols"]) for buffer in buffers}
    drawn = {name: rng.integers(-9, 10, shape).astype(float) for name, shape in shapes.items()}
    for i, rows in enumerate(problem.get("tables", {rank["rank"]: ()})[rank["rank"]]):
        count = shapes[f"indices{i}"][1]
        drawn[f"indices{i}"] = rng.integers(0, max(1, rows), (1, count)).astype(float)
        low = 0 if rows else count  # The bags of an empty table are empty.
        offsets = np.sort(rng.integers(low, count + 1, shapes[f"offsets{i}"])).astype(float)
        offsets[:, :1] = low
        drawn[f"offsets{i}"] = offsets
    return drawn


def expected(problem: dict, drawn: list[dict[str, Array]]) -> list[dict[str, Array]]:
    """Every rank's outputs, straight from the problem; checks the shapes of the inputs too."""

    def given(rank: int, name: str, *shape: int) -> Array:
        return same(drawn[rank][name], shape)

    op, rows, k, outputs = (problem[name] for name in ("op", "rows", "k", "outputs"))
    ranks, m, ends = range(problem["world"]), sum(rows), np.cumsum(rows)
    if op == "all_gather_matmul":
        x = np.concatenate([given(rank, "x", rows[rank], k) for rank in ranks])
        found: list[dict[str, Array]] = [{} for _ in ranks]
        for rank, i in ((rank, i) for rank in ranks for i in range(len(outputs))):
            output, turned = outputs[i], outputs[i].get("operand_transposed", False)
            a = x.T if output.get("axis") == "contraction" else x
            shape = (a.shape[1], output["columns"][rank])
            w = given(rank, output.get("operand", "w"), *(shape[::-1] if turned else shape))
            bias = given(rank, f"bias{i}", 1, shape[1]) if output.get("bias") else 0.0
            found[rank][f"y{i}"] = a @ (w.T if turned else w) + bias
        return found
    n = outputs[0]["columns"][0]
    if op in ("all_to_all_matmul", "matmul_all_to_all"):
        cuts = [np.cumsum(split)[:-1] for split in problem["splits"]]
        x = [np.split(given(rank, "x", rows[rank], k), cuts[rank]) for rank in ranks]
        w = [given(rank, "w", k, n) for rank in ranks]
        late = op == "all_to_all_matmul"  # The receiver's weight, not the sender's.
        y = [[x[s][r] @ w[r if late else s] for s in ranks] for r in ranks]
        return [{"y0": np.concatenate(some)} for some in y]
    if op == "embedding_all_to_all":
        names = [(r, i) for r in ranks for i in range(len(problem["tables"][r]))]
        parts = [np.zeros((m, 0))]
        for r, i in names:
            table = given(r, f"table{i}", problem["tables"][r][i], n)
            parts.append(bags(table, drawn[r][f"indices{i}"], given(r, f"offsets{i}", 1, m), 0, m))
        total = np.concatenate(parts, axis=1)
    else:
        pairs = [(given(r, "x", m, d), given(r, "w", d, n)) for r, d in enumerate(problem["depths"])]
        total = np.sum([x @ w for x, w in pairs], axis=0)
    whole = op == "matmul_all_reduce"
    return [{"y0": total if whole else total[ends[r] - rows[r] : ends[r]]} for r in ranks]


class Run:
    """One run: memory, flags (words that are raised, and what has ended), and who waits for what."""

    def __init__(self, plan: dict, seed: int, calls: int, in_order: bool) -> None:
        self.rng, values, problem = random.Random(seed), np.random.default_rng(seed), plan["problem"]
        self.ranks, self.in_order = sorted(plan["ranks"], key=lambda rank: rank["rank"]), in_order
        everyone = range(problem["world"])
        windows = [[b for b in r["buffers"] if b["role"] == "window"] for r in self.ranks]
        if [r["rank"] for r in self.ranks] != [*everyone] or any(w != windows[0] for w in windows):
            raise Wrong("not one plan for each rank, with the same windows")
        self.copies = min([window.get("copies", 1) for window in windows[0]], default=1)
        self.first_copy = [self.rng.randrange(self.copies) for _ in range(calls)]
        self.drawn = [[draw(r, problem, values) for r in self.ranks] for _ in range(calls)]
        self.expected = [expected(problem, drawn) for drawn in self.drawn]
        homes = [(r, copy) for r in everyone for copy in range(self.copies)]
        self.roles = {(r, b["name"]): b["role"] for r in everyone for b in self.ranks[r]["buffers"]}
        self.arrays = {
            (r, b["name"], copy): np.full((b["rows"], b["cols"]), np.nan)
            for r, copy in homes
            for b in windows[0]
        }
        self.at_rest = {(r, "free", s, 0, copy) for r, copy in homes for s in everyone if s != r}
        self.flags = set(self.at_rest)
        self.waiting: dict[tuple, list[list]] = {}
        self.ready: list[list] = []  # [priority, events, rank, flag to raise at the end]
        self.at: dict[tuple, str] = {}
        self.posted: dict[tuple, dict] = {}
        # How unfair this run is: tournaments, ranks set apart, moods, long turns, late reads.
        levels = ((0, 1, 3, 8), (0, 1, 5), (0, 0.02, 0.3), (0, 0.6, 0.95), (0, 0.5, 1))
        self.keen, apart, self.moods, self.stick, self.late = map(self.rng.choice, levels)
        self.bias = [self.rng.random() * apart for _ in everyone]
        for r in everyone:
            self.spawn(r, ("rank", r), self.all_calls(r))

    def spawn(self, rank: int, end: tuple, events: Events) -> None:
        self.ready.append([self.rng.random() + self.bias[rank], events, rank, end])

    def until(self, flag: tuple) -> Events:
        while flag not in self.flags:
            yield flag

    def set(self, flag: tuple) -> None:
        self.flags.add(flag)
        self.ready.extend(self.waiting.pop(flag, ()))

    def run(self) -> int:
        ready, chance, turn = self.ready, self.rng.random, 0
        while ready:
            if turn >= len(ready) or chance() >= self.stick:
                turn = int(chance() * len(ready))
                for _ in range(self.keen):
                    other = int(chance() * len(ready))
                    turn = other if ready[other][0] > ready[turn][0] else turn
            actor = ready[turn]
            try:
                blocked = next(actor[1], actor)
            except (Wrong, *BROKEN) as error:
                raise Wrong(f"rank {actor[2]}, {self.at.get(actor[3])}: {error}") from error
            if chance() < self.moods:
                actor[0] = chance() + self.bias[actor[2]]
            if blocked is not None:
                ready[turn] = ready[-1]
                ready.pop()
                if blocked is actor:
                    self.set(actor[3])
                else:
                    self.waiting.setdefault(blocked, []).append(actor)
        stuck = [(flag, actor) for flag, actors in self.waiting.items() for actor in actors]
        if stuck:
            raise Wrong("; ".join(f"{self.at.get(a[3], a[3])} stuck for {flag}" for flag, a in stuck))
        if wrong := {flag for flag in self.flags if len(flag) == 5} ^ self.at_rest:
            raise Wrong(f"words not at rest: {sorted(wrong)}")
        return sum(len(rank["steps"]) for rank in self.ranks) * len(self.drawn)

    def all_calls(self, rank: int) -> Events:
        mine = self.ranks[rank]
        for call in range(len(self.drawn)):
            for buffer in mine["buffers"]:
                if buffer["role"] != "window":
                    name, empty = buffer["name"], np.full((buffer["rows"], buffer["cols"]), np.nan)
                    self.arrays[rank, name, 0] = self.drawn[call][rank].get(name, empty)
            lanes: dict[str, list[dict]] = {}
            for step in mine["steps"]:
                lanes.setdefault("all" if self.in_order else step["lane"], []).append(step)
            for lane, steps in lanes.items():
                end = ("lane", rank, call, lane)
                self.spawn(rank, end, self.lane(rank, call, steps, end))
            for lane in lanes:
                yield from self.until(("lane", rank, call, lane))
            for name, value in self.expected[call][rank].items():
                if not np.array_equal(self.arrays[rank, name, 0], value):
                    raise Wrong(f"{name} of call {call} is wrong")

    def lane(self, rank: int, call: int, steps: list[dict], end: tuple) -> Events:
        for step in steps:
            self.at[end] = step["id"]
            for before in step.get("after", ()):
                yield from self.until(("step", rank, call, before))
            yield from self.step(rank, call, step)
            self.set(("step", rank, call, step["id"]))
            yield None
