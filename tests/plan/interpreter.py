"""Runs all ranks of a plan's JSON under a seeded random interleaving: the tests' oracle.

Written from schedules/plan.schema.json alone, it shares nothing with the lowering or the verifier.
Every write takes two events, between which its target is NaN. A window turns to NaN when its rank
says that it is done with it. All values are whole, so that sums are exact.
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


def outputs(problem: dict, given: dict[tuple, Array], rng: np.random.Generator) -> dict:
    """Outputs by rank and name, straight from the problem; draws the given indices and offsets."""
    op, rows, ranks = problem["op"], problem["rows"], range(problem["world"])
    splits, found = problem.get("splits") or [rows for _ in ranks], {}
    tables, sums = problem.get("tables") or [], [np.zeros((sum(rows), 0))]
    for r, i, size in [
        (r, i, size) for r in range(len(tables)) for i, size in enumerate(tables[r])
    ]:
        table, index, begins = (given[r, f"{name}{i}"] for name in ("table", "indices", "offsets"))
        index[...] = rng.integers(0, max(1, size), index.shape)
        low = 0 if size else index.size  # the bags of an empty table are empty
        begins[...] = np.sort(rng.integers(low, index.size + 1, begins.shape))
        sums.append(bags(table, index, begins))
    for r, i, out in [(r, i, out) for r in ranks for i, out in enumerate(problem["outputs"])]:
        cuts = [slice(sum(split[:r]), sum(split[: r + 1])) for split in splits]
        if op == "all_gather_matmul":
            a, b = np.concatenate([given[s, "x"] for s in ranks]), given[r, out["operand"]]
            a = a.T if out.get("axis") == "contraction" else a
            y = a @ (b.T if out.get("operand_transposed") else b)
            y = y + given[r, f"bias{i}"] if out.get("bias") else y
        elif op == "embedding_all_to_all":
            y = np.concatenate(sums, axis=1)[cuts[0]]
        else:
            cuts = [slice(None) for _ in ranks] if op == "matmul_all_reduce" else cuts
            w = [given[r if op == "all_to_all_matmul" else s, "w"] for s in ranks]
            parts = [given[s, "x"][cuts[s]] @ w[s] for s in ranks]
            y = np.concatenate(parts) if "to_all" in op else np.sum(parts, axis=0)
        found[r, f"y{i}"] = y
    return found


def interpret(source: str | dict, seed: int, calls: int = 3, in_order: bool = False) -> int:
    """Runs calls with no barrier between them; returns how many steps ran, or raises Wrong."""
    plan = json.loads(source) if isinstance(source, str) else source
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    ranks = {rank["rank"]: rank["steps"] for rank in plan["ranks"]}
    buffers = {(rank["rank"], b["name"]): b for rank in plan["ranks"] for b in rank["buffers"]}
    blank = {key: np.full((b["rows"], b["cols"]), np.nan) for key, b in buffers.items()}
    windows = [key for key, b in buffers.items() if b["role"] == "window"]
    inputs = [key for key, b in buffers.items() if b["role"] in ("input", "weight")]
    given = {
        key: [numbers.integers(-9, 10, blank[key].shape) * 1.0 for _ in range(calls)]
        for key in inputs
    }
    both = range(min([buffers[key].get("copies", 1) for key in windows], default=1))
    copies_of = [rng.sample(both, len(both)) for _ in range(calls)]
    # Windows by rank, name and copy; other buffers by rank, name and who may reach them.
    memory = {(*key, copy): blank[key].copy() for key in windows for copy in both}
    at_rest = {(r, "free", s, 0, copy) for r in ranks for s in ranks if r != s for copy in both}
    flags = set(at_rest)  # words that are 1 (of 5 fields), and what has ended
    met, at, waiting, ready = {}, {}, {}, []  # a lane is [priority, events, rank, flag at its end]
    # How unfair this run is: tournaments between lanes, ranks set apart, moods, and late reads.
    levels = ((1, 2, 4, 12), (0, 1, 5), (0, 0.02, 0.3), (0, 0.5, 1))
    keen, apart, moods, lateness = map(rng.choice, levels)
    bias = {rank: rng.random() * apart for rank in ranks}

    def until(*needed: tuple) -> Events:
        for flag in needed:
            while flag not in flags:
                yield flag

    def fork(rank: int, lanes: dict[tuple, Events]) -> Events:
        ready.extend([rng.random() + bias[rank], lanes[end], rank, end] for end in lanes)
        return until(*lanes)

    def hoist(flag: tuple) -> None:
        flags.add(flag)
        ready.extend(waiting.pop(flag, ()))

    def play_call(rank: int, call: int) -> Events:
        steps, copies, known = ranks[rank], copies_of[call], knowns[call]

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

        def moved(step: dict, reads: list[dict], i: int, sent: list[list[Array]]) -> Array:
            match step.get("collective", step["kind"]):
                case "reduce":
                    return sum(same(see(region), see(reads[0]).shape) for region in reads)
                case "bag":  # .base is the whole buffer: a bag ends where the next one begins
                    table, index, begins = map(see, reads)
                    return bags(table, index, begins.base)[slice(*reads[2]["cols"])]
                case "all_gather":
                    return np.concatenate([sent[s][0] for s in ranks])
                case "all_to_all":
                    return sent[i][rank]
            return see(reads[i])

        def write(region: dict, value: object) -> Events:
            target, late = see(region), rng.random() < lateness
            early, old = None if late else value(), target.copy()
            target[...] = np.nan
            yield None
            target[...] = old  # a late product may add to it
            target[...] = same(value() if late else early, target.shape)

        def play(step: dict, part: dict) -> Events:
            yield from until(*(word(some, "rank") for some in part.get("waits", ())))
            sent, writes = {}, () if step["kind"] == "gemm" else part.get("writes", ())
            if step["kind"] == "collective":
                order = [other["id"] for other in steps if other["kind"] == "collective"]
                meeting = (call, order.index(step["id"]), step["collective"])
                sent = met.setdefault(meeting, {})
                sent[rank] = [see(region).copy() for region in step["reads"]]
                if len(sent) == len(ranks):
                    hoist(meeting)
                yield from until(meeting)
            for p in part.get("products", ()):
                yield from write(p["c"], lambda p=p: product(step, p))
            for i, region in enumerate(writes):
                yield from write(region, lambda i=i: moved(step, part["reads"], i, sent))
            for some in part.get("signals", ()):
                flag = word(some, "rank" if some["name"] == "ready" else "peer")
                if flag in flags:
                    raise ValueError(f"{flag} is raised twice")
                if some["name"] == "free" and ("done", rank, call, flag[4]) not in flags:
                    flags.add(("done", rank, call, flag[4]))
                    for key in [key for key in windows if key[0] == rank]:
                        memory[*key, flag[4]].fill(np.nan)
                hoist(flag)
                yield None
            flags.difference_update(word(some, "rank") for some in part.get("clears", ()))

        def lane(name: str) -> Events:
            for step in [step for step in steps if name in ("", step["lane"])]:
                at[rank, call, "lane", name] = step["id"]
                yield from until(*((rank, call, other) for other in step.get("after", ())))
                whole = step | {FIELDS.get(step["kind"], "words"): step.get("words", ())}
                parts = [play(step, part) for part in step.get("parts") or [whole]]
                if in_order or len(parts) == 1:
                    for part in parts:
                        yield from part
                else:
                    ends = {(rank, call, step["id"], i): part for i, part in enumerate(parts)}
                    yield from fork(rank, ends)
                hoist((rank, call, step["id"]))
                yield None

        mine = [key for key in buffers if key[0] == rank and key not in windows]
        memory.update({(*key, rank): given[call].get(key, blank[key]).copy() for key in mine})
        lanes = [""] if in_order else dict.fromkeys(step["lane"] for step in steps)
        yield from fork(rank, {(rank, call, "lane", name): lane(name) for name in lanes})
        for key in mine:
            if buffers[key]["role"] != "workspace" and not np.array_equal(
                memory[*key, rank], known[key]
            ):
                raise Wrong(f"{key} is wrong")
        if call + 1 < calls:
            yield from play_call(rank, call + 1)

    for rank in ranks:
        fork(rank, {("rank", rank): play_call(rank, 0)})
    while ready:
        turn = max(rng.choices(ready, k=keen))
        try:
            flag = next(turn[1], "end")
        except (LookupError, TypeError, ValueError) as error:
            raise Wrong(f"rank {turn[2]}, {at.get(turn[3], turn[3])}: {error!r}") from error
        if rng.random() < moods:
            turn[0] = rng.random() + bias[turn[2]]
        if flag is not None:
            ready.remove(turn)
            waiting.setdefault(flag, []).append(turn)
        if flag == "end":
            hoist(turn[3])
    stuck = [
        (at.get(turn[3], turn[3]), flag)
        for flag in waiting
        for turn in waiting[flag]
        if flag != "end"
    ]
    words = sorted(flag for flag in flags ^ at_rest if len(flag) == 5)
    if stuck or words:
        raise Wrong(f"stuck: {stuck}; words not at rest: {words}")
    return sum(map(len, ranks.values())) * calls
