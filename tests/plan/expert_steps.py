"""What steps of kind "experts" do, for the interpreter, from a plan's JSON and its numbers alone.

A row is a slot of a token; rows of experts stand by expert, own tokens first, then by number.
"""

import numpy as np

Array = np.ndarray
HEAD = 4  # numbers of a table before the ends of experts


def listed(ids: Array, rows: list[int], experts: int, rank: int) -> list[int]:
    """The slots whose expert is on a rank, in the order of its rows."""
    own = range(sum(rows[:rank]), sum(rows[: rank + 1]))
    found = [
        (expert, token not in own, token * ids.shape[1] + j)
        for token, chosen in enumerate(ids.astype(int))
        for j, expert in enumerate(chosen)
        if rank * experts <= expert < (rank + 1) * experts
    ]
    return [slot for _, _, slot in sorted(found)]


def solve_experts(problem: dict, known: dict[tuple, Array], rng: np.random.Generator) -> None:
    """Makes routing tables, and outputs straight from the problem."""
    rows, e, topk = problem["rows"], problem["experts"], problem["topk"]
    ranks, tokens = range(len(rows)), sum(rows)
    ids = rng.integers(-1, e * len(rows), (tokens, topk))
    for r, most in enumerate(problem["capacities"]):  # what does not fit has no expert
        for slot in listed(ids, rows, e, r)[most:]:
            ids[slot // topk, slot % topk] = -1
    lists = [listed(ids, rows, e, r) for r in ranks]
    out = problem["outputs"][0]
    slots, gathers = {}, problem["op"].startswith("dispatch")
    x = np.concatenate([known[r, "x"] for r in ranks])
    for r in ranks:
        stack = known[r, out.get("operand", "w")]
        weights = np.split(stack, e)
        weights = [w.T for w in weights] if out.get("operand_transposed") else weights
        first = sum(rows[:r])
        chosen = [int(ids[slot // topk, slot % topk]) - r * e for slot in lists[r]]
        ends = [sum(c <= i for c in chosen) for i in range(e)]
        mine = [rows[r] > slot // topk - first >= 0 for slot in lists[r]]
        own = [ends[i - 1] * (i > 0) for i in range(e)]
        own = [
            own[i] + sum(m and c == i for m, c in zip(mine, chosen, strict=True)) for i in range(e)
        ]
        table = [len(lists[r]), 0, max(map(len, lists)), 0, *ends, *own]
        table += [*ids[first : first + rows[r]].ravel(), *lists[r]]
        known[r, "routing"][0] = np.pad(
            np.array(table, float), (0, known[r, "routing"].size - len(table)), constant_values=-1
        )
        if gathers:
            y = np.zeros((problem["capacities"][r], weights[0].shape[1]))
            for i, slot in enumerate(lists[r]):
                y[i] = x[slot // topk] @ weights[chosen[i]]
            known[r, "y0"] = y
            if len(problem["outputs"]) > 1:
                known[r, "y1"] = x
            continue
        for i, slot in enumerate(lists[r]):
            slots[slot] = known[r, "x"][i] @ weights[chosen[i]]
    if not gathers:
        none = np.zeros(out["columns"][0])
        each = [sum(slots.get(t * topk + j, none) for j in range(topk)) for t in range(tokens)]
        for r in ranks:
            first = sum(rows[:r])
            known[r, "y0"] = np.array(each[first : first + rows[r]]).reshape(rows[r], len(none))


class ExpertStep:
    """A step of a rank: which rows of its targets it writes, and what."""

    def __init__(self, step: dict, rank: int, see: object) -> None:
        self.step, self.rank, self.mode = step, rank, step["modes"][0]
        self.rows, self.topk = step["routed"]["rows"], step["routed"]["topk"]
        self.e = step["routed"]["experts"]
        self.see, self.reads = see, step["reads"]

    def table(self) -> tuple[list[int], list[int], list[int]]:
        """The ends of experts, the own experts, and the list."""
        numbers = self.see(self.reads[0])[0]
        own = HEAD + 2 * self.e
        begin = own + self.rows[self.rank] * self.topk
        used = begin + int(numbers[0])
        parts = numbers[HEAD : HEAD + self.e], numbers[own:begin], numbers[begin:used]
        return [[int(number) for number in part] for part in parts]

    def first(self, rank: int) -> int:
        return sum(self.rows[:rank]) * self.topk

    def written(self, i: int) -> list[int]:
        """The rows of target i that the step writes."""
        region = self.step["writes"][i]
        high = region["rows"][1] - region["rows"][0]
        if self.mode == "sum":
            return list(range(high))
        _, _, slots = self.table()
        owner = region["of"] if self.mode == "gather" else self.owners()[i]
        span = range(self.first(owner), self.first(owner + 1))
        if self.mode == "return":
            return [slot - span.start for slot in slots if slot in span]
        rest = range(len(slots), high) if i == 0 else ()  # rows that no expert has
        return [row for row, slot in enumerate(slots) if slot in span] + [*rest]

    def owners(self) -> list[int]:
        return [rank for rank, count in enumerate(self.rows) if count]

    def value(self, i: int) -> Array:
        """The contents of the rows that `written` names."""
        if self.mode == "sum":
            return self.sums()
        ends, _, slots = self.table()
        weights = np.split(self.see(self.reads[1]), self.e)
        weights = [w.T for w in weights] if self.step.get("transpose_b") else weights
        source = self.see(self.reads[2 + (i if self.mode == "gather" else 0)])
        if self.mode == "gather":
            owner = self.step["writes"][i]["of"]
            at = {
                row: slots[row] // self.topk - sum(self.rows[:owner]) for row in range(len(slots))
            }
        else:
            owner, at = self.owners()[i], {row: row for row in range(len(slots))}
        span = range(self.first(owner), self.first(owner + 1))
        rows = [row for row, slot in enumerate(slots) if slot in span]
        made = [source[at[row]] @ weights[sum(end <= row for end in ends)] for row in rows]
        zeros = len(self.written(i)) - len(rows)
        made += [np.zeros(weights[0].shape[1])] * zeros
        return np.array(made).reshape(len(made), weights[0].shape[1])

    def sums(self) -> Array:
        _, own, slots = self.table()
        source = self.reads[1]
        rows = self.see(source)
        valid = [expert >= 0 for expert in own]
        if "of" in source:
            valid = [slot in set(slots) for slot in range(len(rows))]
        assert len(valid) == len(rows)
        rows = np.where(np.array(valid, bool)[:, None], rows, 0.0)
        return rows.reshape(len(rows) // self.topk, self.topk, -1).sum(1)
