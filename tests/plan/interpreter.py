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


def draw(rank: dict, tables: list[list[int]], rng: np.random.Generator) -> dict[str, Array]:
    given = [buffer for buffer in rank["buffers"] if buffer["role"] in ("input", "weight")]
    drawn = {b["name"]: rng.integers(-9, 10, (b["rows"], b["cols"])).astype(float) for b in given}
    for i, rows in enumerate(tables[rank["rank"]] if tables else ()):
        indices, offsets = drawn[f"indices{i}"], drawn[f"offsets{i}"]
        indices[...] = rng.integers(0, max(1, rows), indices.shape)
        low = 0 if rows else indices.size  # The bags of an empty table are empty.
        offsets[...] = np.sort(rng.integers(low, indices.size + 1, offsets.shape))
    return drawn


def expected(problem: dict, drawn: list[dict[str, Array]]) -> list[list[Array]]:
    """Every rank's outputs, straight from the problem; checks the shapes of the inputs too."""

    def given(rank: int, name: str, *shape: int) -> Array:
        return same(drawn[rank][name], shape)

    op, rows, k, outputs = (problem[name] for name in ("op", "rows", "k", "outputs"))
    ranks, m, n = range(problem["world"]), sum(rows), (outputs[0].get("columns") or [0])[0]
    if op == "all_gather_matmul":
        x, found = np.concatenate([given(r, "x", rows[r], k) for r in ranks]), []
        for r, i, out in ((r, i, out) for r in ranks for i, out in enumerate(outputs)):
            a = x.T if out.get("axis") == "contraction" else x
            shape, turned = (a.shape[1], out["columns"][r]), out.get("operand_transposed")
            w = given(r, out["operand"], *(shape[::-1] if turned else shape))
            bias = given(r, f"bias{i}", 1, shape[1]) if out.get("bias") else 0.0
            found.append(a @ (w.T if turned else w) + bias)
        return [found[r * len(outputs) : (r + 1) * len(outputs)] for r in ranks]
    if op in ("all_to_all_matmul", "matmul_all_to_all"):
        splits = [np.cumsum(split)[:-1] for split in problem["splits"]]
        blocks = [np.split(given(r, "x", rows[r], k), splits[r]) for r in ranks]
        w, after = [given(r, "w", k, n) for r in ranks], op == "all_to_all_matmul"
        return [[np.concatenate([blocks[s][r] @ w[r if after else s] for s in ranks])] for r in ranks]
    if op == "embedding_all_to_all":
        parts = [np.zeros((m, 0))]
        for r, i, size in ((r, i, size) for r in ranks for i, size in enumerate(problem["tables"][r])):
            table, offsets = given(r, f"table{i}", size, n), given(r, f"offsets{i}", 1, m)
            parts.append(bags(table, drawn[r][f"indices{i}"], offsets, 0, m))
        total = np.concatenate(parts, axis=1)
    else:
        depths = problem["depths"]
        total = sum(given(r, "x", m, depths[r]) @ given(r, "w", depths[r], n) for r in ranks)
    whole = op == "matmul_all_reduce"
    return [[total if whole else total[sum(rows[:r]) : sum(rows[: r + 1])]] for r in ranks]


class Run:
    """Memory, flags (5 fields: a raised word; else what has ended or begun), and who waits for them."""

    def __init__(self, plan: dict, seed: int, calls: int, in_order: bool) -> None:
        problem, self.ranks, self.in_order = plan["problem"], plan["ranks"], in_order
        self.rng, values, everyone = random.Random(seed), np.random.default_rng(seed), self.ranks
        self.drawn = [[draw(r, problem.get("tables"), values) for r in everyone] for _ in range(calls)]
        self.expected = [expected(problem, drawn) for drawn in self.drawn]
        self.buffers = {(r["rank"], b["name"]): b for r in self.ranks for b in r["buffers"]}
        self.windows = [b for b in everyone[0]["buffers"] if b["role"] == "window"]
        self.copies = min([b.get("copies", 1) for b in self.windows], default=1)
        self.copy = [self.rng.randrange(self.copies) for _ in range(calls)]
        self.arrays: dict[tuple, Array] = {}
