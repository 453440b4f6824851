"""Compare the grouped products of experts with PyTorch's, on one GPU.

R rows go to e experts of one rank, by random routing of tokens: uniform, or by Zipf's law. Ways:

    grouped      ficco's product, rows by index
    select       index_select of the rows, then torch._grouped_mm
    permuted     torch._grouped_mm of rows that are permuted already
    returned     ficco's product, rows returned to slots, then the sums of slots
    index_add    torch._grouped_mm, then index_add into the tokens' rows

The last two are of the down projection only. All ways are captured in CUDA graphs and run in turns.
"bars" has the geometric mean and the least of ficco's gains: over select, over permuted (256 rows
per expert and more), and over index_add.

    python bench/grouped_gemm.py --out bench/results
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable
from typing import Any

from on_ranks import keep
from record import spread

MODELS = {  # experts of a rank, d, f, slots of a token
    "mixtral_8x7b": (4, 4096, 14336, 2),
    "qwen3_235b_e16": (16, 4096, 1536, 8),
    "qwen3_235b_e64": (64, 4096, 1536, 8),
    "qwen3_30b_e64": (64, 2048, 768, 8),
    "deepseek_v3_e16": (16, 7168, 2048, 8),
    "deepseek_v3_e32": (32, 7168, 2048, 8),
}
ROWS = (2048, 8192, 32768)
ROUTINGS = ("uniform", "zipf")
ROUNDS, CALL_MS, MOST_CALLS = 7, 6.0, 20  # rounds; time and number of calls of a graph
MANY_ROWS = 256  # per expert
BARS = {"over_select": 1.05, "over_permuted": 0.95, "over_index_add": 1.05}


def routed(tokens: int, topk: int, experts: int, routing: str) -> Any:
    """Return random distinct experts of each token, int32 [tokens, topk]."""
    import torch
    from experts_compared.routing import draw

    ids, _ = draw(tokens, experts, topk, routing, torch.Generator("cuda").manual_seed(0))
    return ids.int().contiguous()


class Problem:
    """Operands of a part of a model's layer."""

    def __init__(self, model: str, part: str) -> None:
        import torch

        self.experts, d, f, self.topk = MODELS[model]
        self.d, self.n = (d, 2 * f) if part == "gate_up" else (f, d)
        self.part = part
        kind = {"dtype": torch.bfloat16, "device": "cuda"}
        self.w = torch.randn(self.experts, self.d, self.n, **kind) * self.d**-0.5

    def ways(self, count: int, routing: str, tile: Any = None) -> dict[str, Callable[[], Any]]:
        """Return functions that compute the product of `count` rows; results are compared."""
        import torch

        from ficco.kernels import experts
        from ficco.operators.routing import Routed

        tokens, kind = count // self.topk, {"dtype": torch.bfloat16, "device": "cuda"}
        ids = routed(tokens, self.topk, self.experts, routing)
        sizes = Routed(self.experts, self.topk, (tokens,))
        integers = {"dtype": torch.int32, "device": "cuda"}
        rows = experts.Rows.of(sizes, 0, torch.empty(sizes.length(0), **integers))
        space = experts.workspace_size(count, self.experts, 1)
        experts.route(ids, torch.empty(space, **integers), rows, 0)
        ends = rows.routing[experts.HEADER :][: self.experts].contiguous()
        token = (rows.routing[rows.list_at :] // self.topk).long()
        x, w = torch.randn(tokens, self.d, **kind), self.w
        permuted, y = x[token], torch.empty(count, self.n, **kind)
        found: dict[str, Callable[[], Any]] = {
            "grouped": lambda: experts.grouped(rows, x, None, w, y, tile=tile),
            "select": lambda: torch._grouped_mm(x.index_select(0, token), w, offs=ends),
            "permuted": lambda: torch._grouped_mm(permuted, w, offs=ends),
        }
        if self.part == "down":
            window, sums = torch.empty(count, self.n, **kind), torch.empty(tokens, self.n, **kind)
            zero = torch.zeros(tokens, self.n, **kind)

            def returned() -> None:
                experts.grouped_return(rows, permuted, w, window, tile=tile)
                experts.slot_sums(rows, window, sums)

            def added() -> Any:
                product = torch._grouped_mm(permuted, w, offs=ends)
                return zero.zero_().index_add_(0, token, product)

            found |= {"returned": returned, "index_add": added}
            returned()
            torch.testing.assert_close(sums, added(), rtol=0.05, atol=0.1)
        found["grouped"]()
        torch.testing.assert_close(y, found["permuted"](), rtol=0.02, atol=0.02)
        self.counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        return found


def measure(ways: dict[str, Callable[[], Any]], flops: float) -> dict[str, dict[str, float]]:
    """Return milliseconds per call of each way."""
    import torch

    from ficco.measure.clock import captured, device_ms

    calls = max(min(int(CALL_MS / (flops / 5e11)), MOST_CALLS), 1)
    graphs = {}
    for name, way in ways.items():
        way()
        torch.cuda.synchronize()
        graphs[name] = captured(lambda way=way: [way() for _ in range(calls)], beside=True)
        graphs[name].replay()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            times[name].append(device_ms(graph.replay) / calls)
    for graph in graphs.values():
        graph.reset()
    return {name: spread(values) for name, values in times.items()}


def cases(models: list[str], rows: list[int], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Measure all cases."""
    import torch

    found = []
    for model, part in itertools.product(models, ("gate_up", "down")):
        problem = Problem(model, part)
        for count, routing in itertools.product(rows, ROUTINGS):
            torch.manual_seed(count)
            flops = 2.0 * count * problem.d * problem.n
            ms = measure(problem.ways(count, routing), flops)
            rates = {name: round(flops / 1e9 / each["median"]) for name, each in ms.items()}
            about = {"model": model, "part": part, "rows": count, "routing": routing}
            sizes = {"least": min(problem.counts), "most": max(problem.counts)}
            found.append({**about, "rows_of_experts": sizes, "ms": ms, "tflops": rates})
            say(f"{' '.join(map(str, about.values()))}: {rates}")
        del problem
        torch.cuda.empty_cache()
    return found


def bars(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the geometric mean and the least of the gains over each way of PyTorch's."""
    gains: dict[str, list[tuple[float, str]]] = {name: [] for name in BARS}
    for case in found:
        ms = {name: each["median"] for name, each in case["ms"].items()}
        name = " ".join(str(case[part]) for part in ("model", "part", "rows", "routing"))
        gains["over_select"].append((ms["select"] / ms["grouped"], name))
        if case["rows"] >= MANY_ROWS * MODELS[case["model"]][0]:
            gains["over_permuted"].append((ms["permuted"] / ms["grouped"], name))
        if "returned" in ms:
            gains["over_index_add"].append((ms["index_add"] / ms["returned"], name))
    return {
        bar: {
            "cases": len(each),
            "geometric_mean": round(math.exp(statistics.fmean(math.log(g) for g, _ in each)), 3),
            "least": round(min(each)[0], 3),
            "least_case": min(each)[1],
            "bar": BARS[bar],
        }
        for bar, each in gains.items()
        if each
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--out", metavar="FOLDER", default="bench/results")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    options = parser.parse_args()
    found = cases(options.models, options.rows, lambda text: print(text, flush=True))
    reached = bars(found)
    print(json.dumps(reached, indent=1))
    fields = {"dtype": "bfloat16", "bars": reached, "cases": found}
    keep("grouped_gemm", "grouped_gemm", 1, fields, options.out)
    return 0 if all(each["geometric_mean"] >= each["bar"] for each in reached.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
