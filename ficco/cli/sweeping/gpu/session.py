"""The launcher's side of a measurement on GPUs: start and restart ranks, and write the journal.

A point that hangs or ends its ranks is recorded as bad, a part or a trace as missing; new ranks
continue with the rest.
"""

from __future__ import annotations

import json
import math
import pickle
import time
from pathlib import Path
from typing import Any, NamedTuple

from ficco.cli.sweeping.grid import Grid
from ficco.cli.sweeping.journal import Records
from ficco.cli.sweeping.points import Case, Shape
from ficco.cli.sweeping.simulated import predict
from ficco.cli.sweeping.work import Work
from ficco.core import files
from ficco.core.errors import EngineError
from ficco.measure.launching import run_ranks
from ficco.measure.layout import Layout
from ficco.operators import registry

RANK = ("-P", "-m", "ficco.cli.sweeping.gpu.rank")  # a rank's command; its folder follows
_GRACE_S = 60.0  # time for ranks to end a round after the deadline


def measure(work: Work) -> bool:
    """Measure all missing points; return False if the time ran out.

    Raises:
        EngineError: the ranks ended before they tried a point.
    """
    _refuse_unfit(work)
    while cases := list(work.remaining()):
        if work.late:
            return False
        session = _Session(work, cases)
        reason = session.run()
        if reason and not any(work.remaining()):
            work.progress.say(f"the ranks failed after all measurements were done: {reason}")
            break
        if work.late or session.late:
            return False
        if reason:
            session.blame(reason)
            _end_hopeless(work)
    return True


def _refuse_unfit(work: Work) -> None:
    """Refuse the points of shapes that do not split evenly."""
    for case in work.remaining():
        unfit = layout_of(case.shape).unfit
        for point in work.able(case) if unfit else ():
            work.refuse(point, f"{unfit}; sweeps on GPUs need even shards", "impossible")
    _end_hopeless(work)


def _end_hopeless(work: Work) -> None:
    """End cases without a point that can run, so that no ranks start for their parts."""
    for case in work.remaining():
        if not work.able(case):
            work.end(case)


class _Session:
    """One set of ranks.

    Attributes:
        tries: ids of the points that the ranks last reported to run.
        part: the part or the trace that they reported instead; empty: none.
        late: whether the ranks reported that the time is up.
    """

    def __init__(self, work: Work, cases: list[Case]) -> None:
        self._work, self._cases = work, {case.shape.id: case for case in cases}
        self._read, self._shape = 0, ""
        self._gained = False
        self.tries: list[str] = []
        self.part = ""
        self.late = False

    def run(self) -> str:
        """Run the ranks to their end; return the error, or an empty string."""
        work, left = self._work, self._work.left_s
        cases, deadline = list(self._cases.values()), time.time() + left
        todo = Todo(cases, work.grid, deadline, work.timeout_s, work.journal.copied())
        with files.folder("ficco-sweep-") as folder:
            (folder / TODO).write_bytes(pickle.dumps(todo))
            command = [*RANK, str(folder)]
            limit = left + _GRACE_S if math.isfinite(left) else math.inf
            return run_ranks(command, work.world, folder, limit, lambda: self._watch(folder))

    def blame(self, reason: str) -> None:
        """Record that the running points or part ended the ranks, so that it is not tried again.

        Raises:
            EngineError: nothing ran and nothing new was recorded: new ranks would fail, too.
        """
        work, message = self._work, f"its ranks ended: {reason}"
        if self.part:
            work.lack(self._cases[self._shape], self.part, message)
            return
        tried = [p for c in self._cases.values() for p in work.able(c) if p.id in self.tries]
        for point in tried:
            work.refuse(point, message, "failed")
        if not tried and not self._gained:
            raise EngineError(f"the ranks ended before they tried a point: {reason}")

    def _watch(self, folder: Path) -> None:
        """Process rank 0's new reports."""
        path = folder / "said.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read)
            news = file.read()
        news = news[: news.rfind(b"\n") + 1]
        self._read += len(news)
        for line in news.splitlines():
            for kind, value in json.loads(line).items():
                if kind == "begin":
                    self._shape = value
                elif kind == "tries":
                    self.tries, self.part = value, ""
                elif kind == "part":
                    self.tries, self.part = [], value
                elif kind == "late":
                    self.late = True
                elif kind == "say":
                    self._work.progress.say(value)
                elif kind == "record":
                    self._take(value)

    def _take(self, record: dict[str, Any]) -> None:
        work, case = self._work, self._cases[self._shape]
        if set(record) != {"id", "error"}:  # new ranks check a result again
            self._gained = True
        if "ended" in record:
            predict(work, case)
            work.end(case)
            self.tries, self.part = [], ""
        elif "part" in record and "bad" in record:
            work.lack(case, record["part"], record["bad"])
        elif "bad" in record:
            point = next(p for p in case.points if p.id == record["id"])
            work.refuse(point, record["bad"], record["kind"])
        else:
            work.journal.append(self._shape, **record)
            if "ms" in record and "id" in record:
                work.progress.run(self._shape)


TODO = "todo.pickle"


class Todo(NamedTuple):
    """The cases to measure, and what is known of them.

    Attributes:
        cases: the unfinished cases, in order.
        grid: the grid, which says how often points run.
        deadline: value of `time.time()` after which nothing is started.
        timeout_s: longest wait within a call, in seconds.
        known: the records so far.
    """

    cases: list[Case]
    grid: Grid
    deadline: float
    timeout_s: float
    known: Records


def layout_of(shape: Shape) -> Layout:
    """Return the layout of a rank's tensors for a shape."""
    m = shape.m // shape.world if registry.get(shape.op).flow.splits else shape.m
    return Layout(shape.op, m, shape.n, shape.k, shape.world, shape.dtype)
