"""Runs a plan's JSON under seeded random interleavings; what a write has not ended is NaN.

A device has few places for programs of kernels, often one. A kernel begins when a place is free,
takes one or more, and keeps them until it ends, also while it waits. Each of its programs takes the
next part of the step. Everything else goes on without a place.

A wait step for `entered` compares the calls of two ranks. A rank that ends a call without having
compared it with every peer's would not notice that a peer makes another call.
"""

import json
import random

import numpy as np
from expert_steps import ExpertStep, solve_experts

Array = np.ndarray
Events = type(None for _ in ())  # a generator of None, or of the flag without which it cannot go on


class Wrong(Exception):
    """What a plan did wrong, and where."""


def same(array: Array, shape: tuple[int, ...]) -> Array:
    assert array.shape == shape, f"{array.shape} where {shape} belongs"
    return array


def bags(
    mode: str, table: Array, indices: Array, offsets: Array, weights: Array | None = None
) -> Array:
    bag = np.searchsorted(offsets[0], np.arange(indices.size), side="right") - 1
    used = bag >= 0  # what stands before the first bag is in none
    within = (np.arange(offsets.size)[:, None] == bag[used]).astype(float)
    if mode == "weighted":
        within = within * weights[0, used]
    sums = within @ table[indices[0, used].astype(int)]
    return sums / np.maximum(within.sum(1, keepdims=True), 1) if mode == "mean" else sums


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
        mode = problem["modes"][r][i] if problem.get("modes") else "sum"
        sums.append(bags(mode, table, index, begins, known.get((r, f"weights{i}"))))
    if problem.get("experts"):
        solve_experts(problem, known, rng)
        return known
    depths = problem.get("depths") or [problem["k"] for _ in ranks]
    pairs = problem.get("pairs") or [[depth] for depth in depths]
    for r, i, out in [(s, i, out) for s in ranks for i, out in enumerate(problem["outputs"])]:
        splits = problem.get("splits") or [rows for _ in ranks]
        cuts = [slice(sum(split[:r]), sum(split[: r + 1])) for split in splits]
        operand, turn = out.get("operand", "w"), bool(out.get("operand_transposed"))
        w = [known.get((s, operand), sums[0]) for s in ranks]
        w = [v.T for v in w] if turn else w
        if op == "all_gather_matmul":
            x = same(np.concatenate([known[s, "x"] for s in ranks]), (sum(rows), problem["k"]))
            if out.get("axis") == "gathered":
                known[r, f"y{i}"] = x
                continue
            x = x.T if out.get("axis") == "contraction" else x
            known[r, f"y{i}"] = x @ same(w[r], (x.shape[1], out["columns"][r]))
        elif op == "embedding_all_to_all":
            known[r, "y0"] = np.concatenate(sums, axis=1)[cuts[0]]
        else:
            cuts = [slice(None) for _ in ranks] if op == "matmul_all_reduce" else cuts
            w = [w[r if op == "all_to_all_matmul" else s] for s in ranks]
            y = [same(known[s, "x"], (sum(splits[s]), pairs[s][0]))[cuts[s]] @ w[s] for s in ranks]
            for number, j in [(s, j) for s in ranks for j in range(1, len(pairs[s]))]:
                more = known[number, f"{operand}{j}"]
                more = known[number, f"x{j}"][cuts[number]] @ (more.T if turn else more)
                y[number] = y[number] + more
            known[r, "y0"] = np.concatenate(y) if "to_all" in op else np.sum(y, axis=0)
        if out.get("bias"):  # in an all-reduce every row takes its owner's
            own = [(r, len(known[r, f"y{i}"]))]
            rule = enumerate(rows) if op == "matmul_all_reduce" else own
            tall = [known[s, f"bias{i}"].repeat(height, 0) for s, height in rule]
            known[r, f"y{i}"] += np.concatenate(tall)
    return known


PLACES = (1, 1, 2, 3, 10**6)  # for programs of kernels, on a device
KERNELS = ("gemm", "reduce", "bag", "experts", "local_copy")


def kernels(ranks: dict[int, list[dict]]) -> tuple[set[tuple], set[tuple], set[tuple]]:
    """What runs as a kernel: whole lanes, steps, and steps of signals that only some targets store.

    A copy to a peer on "sm" is a store of a kernel that runs its whole lane. In such a plan so does
    a rank that has a single lane.
    """
    lanes = {rank: {step["lane"] for step in steps} for rank, steps in ranks.items()}
    every = [(rank, step) for rank, steps in ranks.items() for step in steps]
    whole = {(r, s["lane"]) for r, s in every if (s["kind"], s["unit"]) == ("copy", "sm")}
    whole |= {(r, *lanes[r]) for r in ranks if whole and len(lanes[r]) == 1}
    busy = {(r, s["lane"]) for r, s in every if s["kind"] in ("gemm", "reduce", "bag", "experts")}
    steps, signals = set(), set()
    for r, s in every:
        if (r, s["lane"]) in whole:
            continue
        pairs = zip(s.get("reads", ()), s.get("writes", ()), strict=False)
        within = s["kind"] == "copy" and any(a["rank"] == b["rank"] for a, b in pairs)
        if s["kind"] in KERNELS or s["unit"] == "sm" or within:
            steps.add((r, s["id"]))
        elif s["kind"] in ("raise", "clear") and (r, s["lane"]) in busy:
            signals.add((r, s["id"]))
    return whole, steps, signals


def interpret(source: str | dict, seed: int, calls: int = 3, in_order: bool = False) -> int:  # noqa: PLR0915
    """Runs calls with no barrier between them; returns how many steps ran, or raises Wrong."""
    plan = json.loads(source) if isinstance(source, str) else source
    rng, draw = random.Random(seed), np.random.default_rng(seed)
    ranks = {rank["rank"]: rank["steps"] for rank in plan["ranks"]}
    parts_of = {
        (rank, step["id"]): step.get("parts")
        or [{"reads": []} | step | {step["kind"] + "s": step.get("signals", ())}]
        for rank, steps in ranks.items() for step in steps
    }  # fmt: skip  # raises, waits, clears
    buffers = {(rank["rank"], b["name"]): b for rank in plan["ranks"] for b in rank["buffers"]}
    blank = {key: np.full((b["rows"], b["cols"]), np.nan) for key, b in buffers.items()}
    windows = {key: b for key, b in buffers.items() if b["role"] in ("window", "mailbox")}
    given = {k: blank[k].shape for k, b in buffers.items() if b["role"] in ("input", "weight")}
    both = [*range(min([b.get("copies", 1) for b in windows.values()], default=1))]
    flips = rng.choices([both, both[::-1]], [odds := rng.random(), 1 - odds], k=calls)
    mail = any(b["role"] == "mailbox" for b in windows.values())
    if mail:  # they take turns
        flips = [(both, both[::-1])[call % 2] for call in range(calls)]
    memory = {(*key, copy): blank[key].copy() for key in windows for copy in both}
    at_rest = {(r, "free", s, 0, copy) for r in ranks for s in ranks if r != s for copy in both}
    flags = set(at_rest)  # signals that are 1 (of 5 fields), and what has ended
    told, over, given_up = {}, set(), set()  # by call and rank: who has raised free at it; ended
    compared = set()  # call, rank and peer
    values, met, at, waiting, ready = {}, {}, {}, {}, []  # lane: [priority, events, flag at end]
    keen, naps = rng.choice((2, 8)), rng.choice((0.02, 0.1, 0.3))  # the best of keen runs, or naps
    power = 1 / keen
    ordered = 0  # as many as are ready, if these are in the order of their priorities
    chance = rng.random
    bias = {rank: rng.choice((0.0, rng.random())) for rank in ranks}  # some ranks lag behind others
    free, lags = dict.fromkeys(ranks, rng.choice(PLACES)), (0, 0, rng.choice((1, 50)))
    whole, kernel_steps, kernel_words = kernels(ranks)
    kernel_steps |= {key for key in sorted(kernel_words) if rng.random() < 0.5}

    def until(*needed: tuple) -> Events:
        for flag in needed:
            while flag not in flags:
                yield flag

    def fork(name: tuple, lanes: dict[int | str, Events]) -> Events:
        ready.extend([rng.random() + bias[name[0]], lanes[x], (*name, x)] for x in lanes)
        return until(*((*name, x) for x in lanes))

    def hold(rank: int) -> Events:
        """Takes one or more places of a device, and returns how many."""
        for _ in range(rng.choice(lags)):  # until it is launched
            yield None
        while not free[rank]:
            yield "place", rank
        taken = rng.choice((free[rank], rng.randint(1, free[rank])))
        free[rank] -= taken
        return taken

    def release(rank: int, taken: int) -> None:
        free[rank] += taken
        ready.extend(waiting.pop(("place", rank), ()) if taken else ())

    def hoist(flag: tuple) -> None:
        flags.add(flag)
        ready.extend(waiting.pop(flag, ()))

    def free_signals(rank: int, kind: str) -> int:
        parts = [part for step in ranks[rank] for part in parts_of[rank, step["id"]]]
        return sum(one["name"] == "free" for part in parts for one in part.get(kind, ()))

    # They wait for `free` again behind the clear: peers may read their windows until they end.
    late = {rank: free_signals(rank, "waits") > free_signals(rank, "clears") for rank in ranks}

    def give_up(rank: int, copy: int, call: int) -> None:
        """Leaves nothing in a window that a rank may use again, as its call has ended."""
        if (rank, copy, call) not in given_up:
            given_up.add((rank, copy, call))
            for key in [key for key in windows if key[0] == rank]:
                memory[*key, copy].fill(np.nan)

    def play_call(rank: int, call: int) -> Events:  # noqa: PLR0915
        steps, copies = ranks[rank], flips[call]
        known = values.get(call) or values.setdefault(call, solve(plan["problem"], given, draw))
        own = {copy: [key for key in windows if key[0] == rank] for copy in both}  # not given up

        def see(region: dict) -> Array:
            key, copy = (region["rank"], region["buffer"]), copies[region.get("copy", 0)]
            (top, bottom), (left, right) = region["rows"], region["cols"]
            array = memory[*key, copy if key in windows else rank][top:bottom, left:right]
            return same(array, (bottom - top, right - left))

        def signal(one: dict, side: str) -> tuple:
            assert one[side] == rank, f"may not touch {one}"
            copy = copies[one.get("copy", 0)]
            return one["rank"], one["name"], one["peer"], one.get("chunk", 0), copy

        def product(step: dict, p: dict) -> Array:
            a, b = see(p["a"]), see(p["b"])
            y = (a.T if step.get("transpose_a") else a) @ (b.T if step.get("transpose_b") else b)
            return total(y, [p["c"]] * p.get("accumulate", False) + p.get("add", []))

        def total(y: Array, regions: list[dict]) -> Array:
            for term in map(see, regions):
                y = y + same(term, (1 if len(term) == 1 else len(y), y.shape[1]))
            return y

        def moved(step: dict, part: dict, i: int, sent: dict[int, list[Array]]) -> Array:
            reads, like = part.get("reads", ()), part["writes"][i]
            if step["kind"] == "reduce":
                return total(np.zeros(see(like).shape), reads)
            if step["kind"] == "bag":  # .base is the whole buffer: a bag ends where the next begins
                modes = part.get("modes") or ["sum"] * len(part["writes"])
                first = 3 * i + modes[:i].count("weighted")
                table, index, begins, *more = reads[first : first + 3 + (modes[i] == "weighted")]
                given = see(table), see(index), see(begins).base, *map(see, more)
                return bags(modes[i], *given)[slice(*begins["cols"])]
            if step.get("collective") == "all_gather":
                return np.concatenate([array for s in sorted(sent) for array in sent[s]])
            if step.get("collective") in ("reduce_scatter", "all_reduce"):
                number = rank if step["collective"] == "reduce_scatter" else 0
                return sum(same(sent[s][number], see(like).shape) for s in sorted(sent))
            return sent[i][rank] if sent else see(reads[i])

        def write(region: dict, value: object) -> Events:
            target, early = see(region), rng.random() >= 0.5
            new, old = np.copy(value()) if early else None, None if early else target.copy()
            target.fill(np.nan)
            yield None
            if not early:
                target[...] = old  # what the value may add to
            target[...] = same(new if early else value(), target.shape)

        def write_rows(work: ExpertStep, i: int) -> Events:
            """Writes the rows of a target that are those of one rank; others may write the rest."""
            target, rows = see(work.step["writes"][i]), work.written(i)
            early = rng.random() >= 0.5
            new = np.copy(work.value(i)) if early else None
            target[rows] = np.nan
            yield None
            target[rows] = same(new if early else work.value(i), target[rows].shape)

        def play(step: dict, part: dict) -> Events:
            if waits := part.get("waits"):
                yield from until(*(signal(one, "rank") for one in waits))
            if step["kind"] == "wait":
                compared.update((call, rank, x["peer"]) for x in waits if x["name"] == "entered")
            writes, sent = () if step["kind"] == "gemm" else part.get("writes", ()), {}
            if step["kind"] == "collective":
                number = [x["id"] for x in steps if x["kind"] == "collective"].index(step["id"])
                sent = met.setdefault((call, number), {})
                sent[rank] = [see(region).copy() for region in step.get("reads", ())]
                hoist(("met", call, number, rank))
                yield from until(*(("met", call, number, other) for other in ranks))
            for p in part.get("products", ()):
                yield from write(p["c"], lambda p=p: product(step, p))
            if step["kind"] == "experts":
                for i in range(len(writes)):
                    yield from write_rows(ExpertStep(step, rank, see), i)
                writes = ()
            for i, region in enumerate(writes):
                yield from write(region, lambda i=i: moved(step, part, i, sent))
            signals = part.get("raises", ())
            for one in rng.sample(signals, len(signals)) if signals else ():
                flag = signal(one, "rank" if one["name"] == "ready" else "peer")
                assert flag not in flags, f"{flag} is raised twice"
                for key in own.pop(flag[4], ()) if one["name"] == "free" and not late[rank] else ():
                    memory[*key, flag[4]].fill(np.nan)
                for ends in (one["rank"], rank) if one["name"] == "free" and late[rank] else ():
                    told.setdefault((call, ends), []).append((rank, flag[4]))
                    if (call, ends) in over:
                        give_up(rank, flag[4], call)
                hoist(flag)
                yield None
            if clears := part.get("clears"):
                flags.difference_update(signal(one, "rank") for one in clears)

        def lane(name: str) -> Events:
            found = [step for step in steps if name in ("", step["lane"])]
            as_one = name and (rank, name) in whole
            for other in found[0].get("after", ()) if as_one else ():
                yield from until((rank, call, other))
            once = (yield from hold(rank)) if as_one else 0
            for step in found:
                at[rank, call, "lane", name] = step["id"]
                if "after" in step:
                    yield from until(*((rank, call, other) for other in step["after"]))
                taken = (yield from hold(rank)) if (rank, step["id"]) in kernel_steps else 0
                runs = [play(step, part) for part in parts_of[rank, step["id"]]]
                if len(runs) > 1:
                    programs = 1 if in_order else min(taken, len(runs)) or len(runs)
                    left = iter(runs)
                    runs = [(flag for part in left for flag in part) for _ in range(programs)]
                if len(runs) == 1:
                    yield from runs[0]
                else:
                    yield from fork((rank, call, step["id"]), dict(enumerate(runs)))
                hoist((rank, call, step["id"]))
                release(rank, taken)
                yield None
            release(rank, once)

        for key in [key for key in buffers if key[0] == rank and key not in windows]:
            memory[*key, rank] = (known if key in given else blank)[key].copy()
        lanes = [""] if in_order else dict.fromkeys(step["lane"] for step in steps)
        yield from fork((rank, call, "lane"), {name: lane(name) for name in lanes})
        for key in [key for key in known if key[0] == rank]:
            assert np.array_equal(memory[*key, rank], known[key]), f"call {call}: wrong {key[1]}"
        for peer in ranks if windows else ():
            assert peer == rank or (call, rank, peer) in compared, f"no look at {peer}'s call"
        for key in own[copies[0]] if mail else ():  # given up as the call ends
            memory[*key, copies[0]].fill(np.nan)
        over.add((call, rank))
        for other, copy in told.get((call, rank), ()):
            give_up(other, copy, call)
        if call + 1 < calls:
            yield from play_call(rank, call + 1)

    for rank in ranks:
        fork((rank,), {"calls": play_call(rank, 0)})
    while ready:
        if ordered != len(ready):
            ready.sort()
            ordered = len(ready)
        place = int(len(ready) * chance() ** power)  # the best of so many draws
        turn = ready[place]
        try:
            flag = next(turn[1], turn[2])
        except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise Wrong(f"{turn[2]} at {at.get(turn[2])}: {error!r}") from error
        if chance() < naps:
            turn[0], ordered = -chance(), -1
        if flag:
            del ready[place]  # others have been added behind it at most
            ordered -= 1
            hoist(flag) if flag == turn[2] else waiting.setdefault(flag, []).append(turn)
    stuck = [(turn[2], at.get(turn[2]), flag) for flag in waiting for turn in waiting[flag]]
    signals = sorted(flag for flag in flags ^ at_rest if len(flag) == 5)
    if stuck or signals:
        raise Wrong(f"stuck: {stuck}; signals not at rest: {signals}")
    return sum(map(len, ranks.values())) * calls
