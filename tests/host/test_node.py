"""Node: right on every schedule, size and dtype, again and again, and plain about bad input."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
from arrays import DTYPES, assert_right, bits, gathered, inputs

import ficco
from ficco.operators import oracle
from ficco.plan.schedule import Schedule

NAMED = Schedule.names()


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_schedule_is_right_on_sizes_that_nothing_divides(world: int, dtype: str) -> None:
    with ficco.Node(world) as node:
        for m, n, k in ((515, 257, 129), (3, 2, 5), (world + 1, world, 1)):
            xs, ws = inputs(world, m, n, k, dtype)
            for name in NAMED:
                ys = node.all_gather_matmul(xs, ws, schedule=name)
                about = f"{name} m={m} n={n} k={k}"
                assert_right(xs, ws, ys, about)
                again = node.all_gather_matmul(xs, ws, schedule=name)
                assert bits(ys) == bits(again), about


@pytest.mark.parametrize("machine", ["mesh4", "switch4"])
def test_every_route_is_right(machine: str) -> None:
    xs, ws = inputs(4, 37, 11, 13)
    with ficco.Node(4, machine=machine) as node:
        for name in NAMED:
            assert_right(xs, ws, node.all_gather_matmul(xs, ws, schedule=name), name)


def test_all_legal_points_are_right() -> None:
    xs, ws = inputs(3, 40, 7, 19, "bfloat16")
    with ficco.Node(3) as node:
        for cut in ("rows", "columns"):
            for order in ("by_step", "by_peer"):
                for start in ("together", "local_first"):
                    for compute in ("whole", "per_step", "per_chunk", "gated"):
                        if (cut, compute) == ("columns", "gated"):
                            continue
                        for route, taper, grain in (
                            ("rotation", "both", 5),
                            ("rotation", "edge", 3),
                            ("all_peers", "none", 2),
                        ):
                            if taper == "edge" and (cut, order) != ("rows", "by_peer"):
                                continue
                            schedule = Schedule(
                                grain, cut, route, order, start, compute, taper=taper
                            )
                            ys = node.all_gather_matmul(xs, ws, schedule=schedule)
                            assert_right(xs, ws, ys, repr(schedule))


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("dtype", DTYPES)
def test_pytorch_computes_the_same_sums(torch: Any, dtype: str) -> None:
    with ficco.Node(3, compute="torch") as node:
        for m, n, k in ((515, 257, 129), (2, 3, 4)):
            xs, ws = inputs(3, m, n, k, dtype)
            for name in NAMED:
                assert_right(xs, ws, node.all_gather_matmul(xs, ws, schedule=name), name)
            backwards = [w[::-1, ::-1] for w in ws]
            xs[0].flags.writeable = False
            assert_right(xs, backwards, node.all_gather_matmul(xs, backwards), "negative strides")


class TestArguments:
    def test_uneven_and_empty_shards(self) -> None:
        rng = np.random.default_rng(1)
        xs = [rng.standard_normal((m, 6)).astype(np.float32) for m in (0, 9, 1, 0)]
        ws = [rng.standard_normal((6, n)).astype(np.float32) for n in (2, 0, 5, 1)]
        with ficco.Node(4) as node:
            for name in NAMED:
                assert_right(xs, ws, node.all_gather_matmul(xs, ws, schedule=name), name)

    def test_any_strides(self) -> None:
        rng = np.random.default_rng(2)
        big = rng.standard_normal((40, 40)).astype(np.float32)
        shards = {
            "rows apart": [big[0:12:2, 3:10], big[1:5, 0:7], big[3:3, 0:7]],
            "columns apart": [big[0:5, 0:14:2], big[5:9, 0:14:2], big[9:10, 0:14:2]],
            "transposed": [big[0:7, 0:4].T, big[7:14, 0:3].T, big[0:7, 9:10].T],
            "backwards": [big[5::-1, 6::-1], big[9:5:-1, 0:7], big[2:3, 0:7]],
            "one row again": [np.broadcast_to(big[0, :7], (4, 7)), big[0:1, :7], big[:2, :7]],
        }
        weights = {
            "plain": [big[:7, :3], big[7:14, :3], big[:7, 3:5]],
            "linear.weight.T": [big[:3, :7].T, big[3:6, :7].T, big[6:8, :7].T],
            "apart": [big[0:14:2, 0:9:3], big[0:7, 0:9:3], big[14:0:-2, 0:2]],
        }
        with ficco.Node(3) as node:
            for x_name, xs in shards.items():
                for w_name, ws in weights.items():
                    for name in NAMED:
                        ys = node.all_gather_matmul(xs, ws, schedule=name)
                        assert_right(xs, ws, ys, f"{x_name}, {w_name}, {name}")

    def test_bias_and_several_outputs_of_one_gather(self) -> None:
        rng = np.random.default_rng(3)

        def draw(*shape: int) -> Any:
            return rng.standard_normal(shape).astype(np.float32)

        xs = [draw(5, 6), draw(4, 6)]
        x = np.concatenate(xs)
        ws = [(draw(6, 3), draw(6, 2), draw(9, 4)) for _ in range(2)]
        bias = [(draw(3), None, draw(1, 4)) for _ in range(2)]
        axes = ("rows", "rows", "contraction")
        with ficco.Node(2) as node:
            for name in NAMED:
                if name == "gated_1d":
                    continue  # parts of one launch cannot add up along the contraction
                ys = node.all_gather_matmul(xs, ws, bias=bias, axes=axes, schedule=name)
                for rank in range(2):
                    q, k, dw = ys[rank]
                    np.testing.assert_allclose(
                        q, x @ ws[rank][0] + bias[rank][0], rtol=2e-5, atol=1e-5
                    )
                    np.testing.assert_allclose(k, x @ ws[rank][1], rtol=2e-5, atol=1e-5)
                    want = x.T @ ws[rank][2] + bias[rank][2]
                    np.testing.assert_allclose(dw, want, rtol=2e-5, atol=1e-5)

    def test_inputs_are_left_alone(self) -> None:
        xs, ws = inputs(2, 9, 4, 5)
        before = bits(xs) + bits(ws)
        with ficco.Node(2) as node:
            for name in NAMED:
                node.all_gather_matmul(xs, ws, schedule=name)
        assert bits(xs) + bits(ws) == before

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda xs, ws: (xs[:1], ws), "xs has 1 entries, the node has 2 ranks"),
            (lambda xs, ws: (np.stack(xs), ws), "give a list"),
            (lambda xs, ws: (xs, [ws[0]]), "ws has 1 entries"),
            (lambda xs, ws: ([xs[0], xs[1][:, :3]], ws), r"xs\[1\] has 3 columns"),
            (lambda xs, ws: (xs, [ws[0], ws[1][:3]]), r"ws\[1\] has shape \(3, 2\)"),
            (lambda xs, ws: ([xs[0], xs[1].astype(np.float16)], ws), "give one dtype"),
            (lambda xs, ws: ([x.astype(np.float64) for x in xs], ws), "float64 found"),
            (lambda xs, ws: ([x.astype(">f4") for x in xs], ws), "order"),
            (lambda xs, ws: ([xs[0], None], ws), "NoneType found"),
            (lambda xs, ws: ([xs[0], np.ma.masked_array(xs[1])], ws), "is masked"),
            (lambda xs, ws: ([xs[0], xs[1][None]], ws), r"shape \(1, 4, 5\)"),
            (lambda xs, ws: (xs, [(ws[0], ws[0]), (ws[1],)]), r"ws\[1\] has 1 weights"),
        ],
    )
    def test_what_does_not_fit_is_named(self, change: Any, words: str) -> None:
        xs, ws = inputs(2, 8, 4, 5)
        with ficco.Node(2) as node:
            with pytest.raises(ficco.InputError, match=words):
                node.all_gather_matmul(*change(xs, ws))
            assert_right(xs, ws, node.all_gather_matmul(xs, ws))

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"bias": [np.zeros(2, np.float32)] * 3}, "bias has 3 entries"),
            ({"bias": [np.zeros(9, np.float32)] * 2}, r"bias\[0\] has shape \(9,\)"),
            ({"bias": [np.zeros(2, np.float32), None]}, "some ranks have one"),
            ({"bias": [np.zeros(2), np.zeros(2)]}, "give one dtype"),
            ({"bias": 3}, "give a list"),
            ({"axes": ("rows", "rows")}, "axes has 2 entries"),
            ({"axes": ("k",)}, "'rows' or 'contraction'"),
            ({"schedule": "hetero"}, "unknown schedule"),
            ({"grain": 0}, "grain=0"),
            ({"schedule": Schedule(transport="sm")}, "transport='dma'"),
        ],
    )
    def test_options_that_cannot_be_are_named(self, options: dict[str, Any], words: str) -> None:
        xs, ws = inputs(2, 8, 4, 5)
        with ficco.Node(2) as node, pytest.raises(ficco.InputError, match=words):
            node.all_gather_matmul(xs, ws, **options)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"world": 0}, "1 to 64"),
            ({"world": True}, "1 to 64"),
            ({"world": 65}, "1 to 64"),
            ({"world": 5, "machine": "mesh4"}, "has 4"),
            ({"world": 2, "machine": "mesh"}, "unknown machine"),
            ({"world": 2, "schedule": "fastest"}, "unknown schedule"),
            ({"world": 2, "compute": "jax"}, "'numpy' or 'torch'"),
            ({"world": 2, "machine": 3}, "a name, or a path"),
            ({"world": 2, "schedule": 3}, "a name, or a path"),
            ({"world": 2, "timeout_s": 0}, "timeout_s=0"),
            ({"world": 2, "timeout_s": float("nan")}, "timeout_s=nan"),
        ],
    )
    def test_nodes_that_cannot_be_are_named(self, options: dict[str, Any], words: str) -> None:
        with pytest.raises(ficco.InputError, match=words):
            ficco.Node(**options)


class TestAgainAndAgain:
    def test_a_hundred_calls_with_changing_shapes_and_schedules(self) -> None:
        rng = np.random.default_rng(4)
        with ficco.Node(3) as node:
            for turn in range(100):
                m, n, k = (int(v) for v in rng.integers(1, 60, 3))
                xs, ws = inputs(3, m, n, k, DTYPES[turn % 3], seed=turn)
                name, grain = NAMED[int(rng.integers(len(NAMED)))], int(rng.integers(1, 9))
                ys = node.all_gather_matmul(xs, ws, schedule=name, grain=grain)
                assert_right(xs, ws, ys, f"call {turn}, {name}, grain {grain}, m={m} n={n} k={k}")

    def test_windows_grow_and_are_shared_by_all_shapes(self) -> None:
        with ficco.Node(2) as node:
            assert node.window_bytes == 0
            xs, ws = inputs(2, 300, 3, 100)
            node.all_gather_matmul(xs, ws)
            grown = node.window_bytes
            assert grown >= 2 * 2 * 300 * 100 * 4
            small = inputs(2, 10, 3, 4)
            assert_right(*small, node.all_gather_matmul(*small))
            assert_right(xs, ws, node.all_gather_matmul(xs, ws))
            assert node.window_bytes == grown

    def test_more_shapes_than_bound_plans_are_kept(self) -> None:
        with ficco.Node(2) as node:
            for m in [*range(1, 80), 1, 2]:
                xs, ws = inputs(2, m, 2, 3)
                assert_right(xs, ws, node.all_gather_matmul(xs, ws), f"m={m}")

    def test_two_nodes_at_once(self) -> None:
        failures: list[BaseException] = []

        def use(seed: int, world: int) -> None:
            try:
                with ficco.Node(world) as node:
                    for turn in range(40):
                        xs, ws = inputs(world, 31 + turn, 9, 17, seed=seed + turn)
                        name = NAMED[turn % len(NAMED)]
                        assert_right(xs, ws, node.all_gather_matmul(xs, ws, schedule=name), name)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=use, args=(s, w)) for s, w in ((0, 4), (500, 3))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not failures, failures

    def test_one_node_from_two_threads(self) -> None:
        results: dict[int, bool] = {}
        with ficco.Node(2) as node:

            def use(seed: int) -> None:
                for turn in range(30):
                    xs, ws = inputs(2, 11 + seed, 4, 6, seed=seed * 100 + turn)
                    assert_right(xs, ws, node.all_gather_matmul(xs, ws))
                results[seed] = True

            threads = [threading.Thread(target=use, args=(s,)) for s in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        assert results == {0: True, 1: True, 2: True}

    def test_threads_and_memory_end_with_the_node(self) -> None:
        before = threading.active_count(), _native_threads()
        for _ in range(5):
            node = ficco.Node(4)
            xs, ws = inputs(4, 16, 4, 4)
            node.all_gather_matmul(xs, ws)
            node.close()
            del node
        gc.collect()
        # No more than there were: one of an earlier test may have been about to end.
        assert threading.active_count() <= before[0] and _native_threads() <= before[1]


def _native_threads() -> int:
    from pathlib import Path

    return len(list(Path("/proc/self/task").iterdir()))


class TestOracle:
    """The verdict itself: it must notice what the product must never do."""

    xs, ws = inputs(2, 64, 32, 512)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_missing_term_is_noticed(self, dtype: str) -> None:
        xs, ws = inputs(2, 64, 32, 512, dtype)
        exact = gathered(xs, ws)[0]
        x = np.concatenate(xs).astype(np.float64)
        short = x[:, 1:] @ ws[0][1:].astype(np.float64)
        assert oracle.judge(exact.value.astype(xs[0].dtype), exact, dtype).ok
        assert not oracle.judge(short.astype(xs[0].dtype), exact, dtype).ok

    def test_one_wrong_element_nan_and_shape_are_noticed(self) -> None:
        exact = gathered(self.xs, self.ws)[0]
        y = exact.value.astype(np.float32)
        for bad in (np.nan, np.inf, 0.0):
            nan_filled = y.copy()
            nan_filled[5, 5] = bad
            assert not oracle.judge(nan_filled, exact, "float32").ok
        assert not oracle.judge(y[:-1], exact, "float32").ok
