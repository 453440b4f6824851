"""Runs a plan's JSON under seeded random interleavings: an oracle written from its schema alone.

Every write takes two events, between which its target is NaN; a window turns to NaN when its rank
says that it is done with it. All values are whole numbers, so that sums are exact.
"""

import json
import random

import numpy as np

Array = np.ndarray
Events = type(None for _ in ())  # a generator of None, or of the flag without which it cannot go on


class Wrong(Exception):
    """What a plan did wrong, and where."""


def same(array: Array, shape: tuple[int, ...]) -> Array:
    if array.shape != shape:
        raise ValueError(f"{array.shape} where {shape} belongs")
    return array


def bags(table: Array, indices: Array, offsets: Array) -> Array:
    bag = np.searchsorted(offsets[0], np.arange(indices.size), side="right") - 1
    used = bag >= 0  # what stands before the first bag is in none
    return (np.arange(offsets.size)[:, None] == bag[used]) @ table[indices[0, used].astype(int)]


def solve(problem: dict, shapes: dict, rng: np.random.Generator) -> dict[tuple, Array]:
    """Random inputs, and outputs straight from the problem, by rank and name."""
    op, rows, ranks = problem["op"], problem["rows"], range(problem["world"])
    known = {key: rng.integers(-9, 10, shape).astype(float) for key, shape in shapes.items()}
    tables, sums = problem.get("tables") or [], [np.zeros((sum(rows), 0))]
    for r, i in [(r, i) for r, sizes in enumerate(tables) for i in range(len(sizes))]:
        table, index, begins = (known[r, f"{name}{i}"] for name in ("table", "indices", "offsets"))
        index[...] = rng.integers(0, max(1, len(table)), index.shape)
        low = 0 if len(table) else index.size  # the bags of an empty table are empty
        begins[...] = np.sort(rng.integers(low, index.size + 1, begins.shape))
        sums.append(bags(table, index, begins))
    for r, i, out in [(s, i, out) for s in ranks for i, out in enumerate(problem["outputs"])]:
        splits = problem.get("splits") or [rows for _ in ranks]
        cuts = [slice(sum(split[:r]), sum(split[: r + 1])) for split in splits]
        if op == "all_gather_matmul":
            a, b = np.concatenate([known[s, "x"] for s in ranks]), known[r, out["operand"]]
            a = a.T if out.get("axis") == "contraction" else a
            y = a @ (b.T if out.get("operand_transposed") else b)
            known[r, f"y{i}"] = y + (known[r, f"bias{i}"] if out.get("bias") else 0)
        elif op == "embedding_all_to_all":
            known[r, "y0"] = np.concatenate(sums, axis=1)[cuts[0]]
        else:
            cuts = [slice(None) for _ in ranks] if op == "matmul_all_reduce" else cuts
            w = [known[r if op == "all_to_all_matmul" else s, "w"] for s in ranks]
            parts = [known[s, "x"][cuts[s]] @ w[s] for s in ranks]
            known[r, "y0"] = np.concatenate(parts) if "to_all" in op else np.sum(parts, axis=0)
    return known


def interpret(source: str | dict, seed: int, calls: int = 3, in_order: bool = False) -> int:  # noqa: PLR0915
    """Runs calls with no barrier between them; returns how many steps ran, or raises Wrong."""
    plan = json.loads(source) if isinstance(source, str) else source
    rng, draw = random.Random(seed), np.random.default_rng(seed)
    ranks = {rank["rank"]: rank["steps"] for rank in plan["ranks"]}
    buffers = {(rank["rank"], b["name"]): b for rank in plan["ranks"] for b in rank["buffers"]}
    blank = {key: np.full((b["rows"], b["cols"]), np.nan) for key, b in buffers.items()}
    windows = {key: b for key, b in buffers.items() if b["role"] == "window"}
    given = {k: blank[k].shape for k, b in buffers.items() if b["role"] in ("input", "weight")}
    both = range(min([b.get("copies", 1) for b in windows.values()], default=1))
    flips = [rng.sample(both, len(both)) for _ in range(calls)]
    values = [solve(plan["problem"], given, draw) for _ in range(calls)]
    # Windows by rank, name and copy; other buffers by rank, name and who may reach them.
    memory = {(*key, copy): blank[key].copy() for key in windows for copy in both}
    at_rest = {(r, "free", s, 0, copy) for r in ranks for s in ranks if r != s for copy in both}
    flags = set(at_rest)  # words that are 1 (of 5 fields), and what has ended
    met, at, waiting, ready = {}, {}, {}, []  # a lane is [priority, events, flag at its end]
    # How unfair this run is: tournaments between lanes, ranks set apart, moods, and late reads.
    keen, apart, moods, lateness = map(
        rng.choice, ((1, 2, 4, 12), (0, 1, 5), (0, 0.05), (0, 0.5, 1))
    )
    bias = {rank: rng.random() * apart for rank in ranks}

    def until(*needed: tuple) -> Events:
        for flag in needed:
            while flag not in flags:
                yield flag

    def fork(name: tuple, lanes: dict[int | str, Events]) -> Events:
        ready.extend([rng.random() + bias[name[0]], lanes[x], (*name, x)] for x in lanes)
        return until(*((*name, x) for x in lanes))

    def hoist(flag: tuple) -> None:
        flags.add(flag)
        ready.extend(waiting.pop(flag, ()))

    def play_call(rank: int, call: int) -> Events:  # noqa: PLR0915
        steps, copies, known, freed = ranks[rank], flips[call], values[call], set()

        def see(region: dict) -> Array:
            key, copy = (region["rank"], region["buffer"]), copies[region.get("copy", 0)]
            (top, bottom), (left, right) = region["rows"], region["cols"]
            array = memory[*key, copy if key in windows else rank][top:bottom, left:right]
            return same(array, (bottom - top, right - left))

        def word(some: dict, side: str) -> tuple:
            if some[side] != rank:
                raise ValueError(f"may not touch {some}")
            copy = copies[some.get("copy", 0)]
            return some["rank"], some["name"], some["peer"], some.get("chunk", 0), copy

        def product(step: dict, p: dict) -> Array:
            a, b, c = (see(p[name]) for name in "abc")
            y = (a.T if step.get("transpose_a") else a) @ (b.T if step.get("transpose_b") else b)
            for term in ([c] if p.get("accumulate") else []) + [see(x) for x in p.get("add", ())]:
                y = y + same(term, (1 if len(term) == 1 else len(c), c.shape[1]))
            return y

        def moved(step: dict, reads: list[dict], i: int, sent: dict[int, list[Array]]) -> Array:
            if step["kind"] == "reduce":
                return sum(same(see(region), see(reads[0]).shape) for region in reads)
            if step["kind"] == "bag":  # .base is the whole buffer: a bag ends where the next begins
                return bags(*map(see, reads[:2]), see(reads[2]).base)[slice(*reads[2]["cols"])]
            if step.get("collective") == "all_gather":
                return np.concatenate([sent[s][0] for s in sorted(sent)])
            return sent[i][rank] if sent else see(reads[i])

        def write(region: dict, value: object) -> Events:
            target, late = see(region), rng.random() < lateness
            early, old = None if late else np.copy(value()), target.copy()
            target[...] = np.nan
            yield None
            target[...] = old  # what a late value may add to
            target[...] = same(value() if late else early, target.shape)

        def play(step: dict, part: dict) -> Events:
            yield from until(*(word(some, "rank") for some in part.get("waits", ())))
            writes, sent = () if step["kind"] == "gemm" else part.get("writes", ()), {}
            if step["kind"] == "collective":
                number = [x["id"] for x in steps if x["kind"] == "collective"].index(step["id"])
                sent = met.setdefault((call, number), {})
                sent[rank] = [see(region).copy() for region in step["reads"]]
                hoist(("met", call, number, rank))
                yield from until(*(("met", call, number, other) for other in ranks))
            for p in part.get("products", ()):
                yield from write(p["c"], lambda p=p: product(step, p))
            for i, region in enumerate(writes):
                yield from write(region, lambda i=i: moved(step, part["reads"], i, sent))
            for some in part.get("signals", ()):
                flag = word(some, "rank" if some["name"] == "ready" else "peer")
                if flag in flags:
                    raise ValueError(f"{flag} is raised twice")
                if some["name"] == "free" and flag[4] not in freed:
                    freed.add(flag[4])
                    for key in [key for key in windows if key[0] == rank]:
                        memory[*key, flag[4]].fill(np.nan)
                hoist(flag)
                yield None
            flags.difference_update(word(some, "rank") for some in part.get("clears", ()))

        def lane(name: str) -> Events:
            for step in [step for step in steps if name in ("", step["lane"])]:
                at[rank, call, "lane", name] = step["id"]
                yield from until(*((rank, call, other) for other in step.get("after", ())))
                whole = step | {step["kind"] + "s": step.get("words", ())}  # waits, signals, clears
                parts = [play(step, part) for part in step.get("parts") or [whole]]
                if in_order or len(parts) == 1:
                    for part in parts:
                        yield from part
                else:
                    yield from fork((rank, call, step["id"]), dict(enumerate(parts)))
                hoist((rank, call, step["id"]))
                yield None

        for key in [key for key in buffers if key[0] == rank and key not in windows]:
            memory[*key, rank] = (known if key in given else blank)[key].copy()
        lanes = [""] if in_order else dict.fromkeys(step["lane"] for step in steps)
        yield from fork((rank, call, "lane"), {name: lane(name) for name in lanes})
        for key in [key for key in known if key[0] == rank]:
            if not np.array_equal(memory[*key, rank], known[key]):
                raise ValueError(f"{key[1]} is wrong at the end of call {call}")
        if call + 1 < calls:
            yield from play_call(rank, call + 1)

    for rank in ranks:
        fork((rank,), {"calls": play_call(rank, 0)})
    while ready:
        turn = max(rng.choices(ready, k=keen))
        try:
            flag = next(turn[1], turn[2])
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise Wrong(f"{turn[2]} at {at.get(turn[2])}: {error!r}") from error
        if rng.random() < moods:
            turn[0] = rng.random() + bias[turn[2][0]]
        if flag == turn[2]:
            hoist(flag)
        if flag:
            ready.remove(turn)
            waiting.setdefault(flag, []).append(turn)
    stuck = [(x[2], at.get(x[2]), flag) for flag in waiting.keys() - flags for x in waiting[flag]]
    words = sorted(flag for flag in flags ^ at_rest if len(flag) == 5)
    if stuck or words:
        raise Wrong(f"stuck: {stuck}; words not at rest: {words}")
    return sum(map(len, ranks.values())) * calls
