"""What cannot be is refused by Node, Problem and Schedule in one InputError that names it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import ficco
from ficco.core.errors import InputError

XS, WS = [np.ones((2, 3), np.float32)] * 2, [np.ones((3, 4), np.float32)] * 2
NOT_SECONDS = (0, -1, 0.0, float("nan"), float("inf"), 1e300, "30", "", None, True, 10**400, [1])
NOT_SIZES = ("4", "", 4.0, True, None, float("nan"), [4], -1, 10**30)


def refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        call()
    assert words in str(error.value) and len(str(error.value)) < 500


@pytest.fixture(scope="module")
def node() -> Iterator[ficco.Node]:
    with ficco.Node(2, machine="host") as found:
        yield found


@pytest.mark.parametrize("value", NOT_SECONDS, ids=lambda value: f"{value!r:.9}")
def test_timeouts(node: ficco.Node, value: Any) -> None:
    refused(lambda: ficco.Node(1, timeout_s=value), "timeout_s=")
    refused(lambda: setattr(node, "timeout_s", value), "timeout_s=")
    assert node.timeout_s == 30.0
    for right in (1, 0.5, np.float32(2), 1e6):
        with ficco.Node(1, timeout_s=right) as other:  # type: ignore[arg-type]
            assert other.timeout_s == float(right)


@pytest.mark.parametrize("value", NOT_SIZES, ids=lambda value: f"{value!r:.9}")
def test_sizes(node: ficco.Node, value: Any) -> None:
    refused(lambda: ficco.Node(value), "world=")
    right: dict[str, Any] = {"op": "all_gather_matmul", "world": 2, "m": 8, "n": 4, "k": 4}
    for name in ("world", "m", "n", "k"):
        refused(lambda: ficco.Problem.chunked(**right | {name: value}), name)  # noqa: B023
    for rows in ([value, 7], value):
        if rows is not None:
            refused(lambda: ficco.Problem.chunked(**right, rows=rows), "rows")  # noqa: B023
            refused(lambda: node.matmul_reduce_scatter(XS, WS, rows=rows), "rows")  # noqa: B023
        refused(lambda: node.all_to_all_matmul(XS, WS, [[1, 1], rows]), "splits")  # noqa: B023
    for rows, k, columns in (
        ((value, 4), 4, (1, 1)), ((4, 4), value, (1, 1)), ((4, 4), 4, (value, 1)),
        (value, 4, (1, 1)), ((4, 4), 4, value),
    ):  # fmt: skip
        outputs = (ficco.Output(columns),)
        refused(lambda: ficco.Problem("all_gather_matmul", 2, rows, k, outputs), "")  # noqa: B023
    if value is not None:
        refused(lambda: node.all_gather_matmul(XS, WS, grain=value), "grain=")


@pytest.mark.parametrize("value", [None, "", "xs", 3, XS[0], [None, None], [XS[0]], ["a", "b"]])
def test_arrays(node: ficco.Node, value: Any) -> None:
    for call in (node.all_gather_matmul, node.matmul_reduce_scatter, node.matmul_all_reduce):
        refused(lambda: call(value, WS), "")  # noqa: B023
        refused(lambda: call(XS, value), "")  # noqa: B023
    refused(lambda: node.all_to_all_matmul(value, WS, [[1, 1], [1, 1]]), "xs")


@pytest.mark.parametrize("value", ["", 3, b"serial", ["serial"], "x.toml", "\0.toml", True])
def test_names(node: ficco.Node, value: Any) -> None:
    refused(lambda: ficco.Node(1, schedule=value), "schedule")
    refused(lambda: ficco.Node(1, machine=value), "machine")
    refused(lambda: ficco.Node(1, compute=value), "compute")
    refused(lambda: node.all_gather_matmul(XS, WS, schedule=value), "schedule")
    right: dict[str, Any] = {"op": "all_gather_matmul", "world": 2, "m": 8, "n": 4, "k": 4}
    refused(lambda: ficco.Problem.chunked(**right | {"op": value}), "operator")
    refused(lambda: ficco.Problem.chunked(**right, dtype=value), "dtype")
    refused(lambda: ficco.Schedule(route=value), "route")
    refused(lambda: node.all_gather_matmul(XS, WS, axes=value), "axes")
    refused(lambda: node.run(value, [{}, {}]), "problem=")


@pytest.mark.parametrize("name", ["hip", "mi300x8"])
def test_a_node_on_amd_gpus_is_refused_with_what_runs_there(name: str) -> None:
    refused(lambda: ficco.Node(2, machine=name), "use the torch functions")


@pytest.mark.parametrize(
    "value", [np.zeros(2), np.array("auto"), np.array(["auto", "serial"]), ["auto"], {}]
)
def test_schedules_of_other_types(node: ficco.Node, value: Any) -> None:
    words = f"schedule: {type(value).__name__} found"
    refused(lambda: ficco.Node(1, schedule=value), words)
    refused(lambda: node.all_gather_matmul(XS, WS, schedule=value), words)


@pytest.mark.parametrize("value", [None, 3, "x", {}, np.array(1)])
def test_lists_of_tables(node: ficco.Node, value: Any) -> None:
    right: dict[str, Any] = {"tables": [[XS[0]]] * 2, "indices": [[np.zeros(2, np.int64)]] * 2}
    right["offsets"] = right["indices"]
    assert len(node.embedding_all_to_all(**right)) == 2
    for name in right:
        given = right | {name: [value] * 2}
        words = f"{name}[0]: {type(value).__name__} found; give a list"
        refused(lambda: node.embedding_all_to_all(**given), words)  # noqa: B023


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_node_is_not_copied(node: ficco.Node, take: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="make a new Node"):
        take(node)


@pytest.mark.parametrize("planned", [False, True])
def test_arrays_by_name(node: ficco.Node, planned: bool) -> None:
    problem = ficco.Problem.chunked("all_gather_matmul", world=2, m=4, n=8, k=3)
    arrays = [{"x": x, "w": w} for x, w in zip(XS, WS, strict=True)]
    given: Any = ficco.lower(problem, ficco.Schedule.named("serial")) if planned else problem
    wrong = [arrays[0], arrays[1] | {"ww": WS[0]}]
    refused(lambda: node.run(given, wrong), "arrays[1] has 'ww', which is no input of all_gather_m")
    for not_arrays in (None, 3, "x", XS):
        refused(lambda: node.run(given, [arrays[0], not_arrays]), "arrays[1]=")  # noqa: B023
    assert len(node.run(given, arrays)) == 2, "the node is as it was"


def test_no_weight(node: ficco.Node) -> None:
    refused(lambda: node.all_gather_matmul(XS, [(), ()]), "ws: no weight")


@pytest.mark.parametrize("outputs", [(3,), 3, ficco.Output((1, 2)), ((1, 2),), ["x"], None])
def test_outputs(outputs: Any) -> None:
    problem = {"op": "all_gather_matmul", "world": 2, "rows": (1, 2), "k": 3, "outputs": outputs}
    refused(lambda: ficco.Problem(**problem), "ficco.Output is needed")


def test_what_is_no_truth_value(node: ficco.Node) -> None:
    for value in ("no", 1, None):
        refused(lambda: setattr(node, "traced", value), "traced=")  # noqa: B023
    node.traced = False


def test_a_closed_node_has_no_windows() -> None:
    node = ficco.Node(2, machine="host")
    node.matmul_all_reduce(XS, WS)
    node.close()
    assert node.window_bytes == 0


def test_errors_are_unpickled_as_they_were() -> None:
    error = ficco.TimeoutExceeded(1, "push.wait", "data[0][0]@1", 2.5, "Restart.")
    same = pickle.loads(pickle.dumps(error))
    assert type(same) is ficco.TimeoutExceeded and str(same) == str(error)
    assert vars(same) == vars(error)
