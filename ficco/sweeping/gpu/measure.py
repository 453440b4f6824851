"""The sweep's side of a measurement on GPUs: starts ranks, keeps the journal, starts them anew.

A point that hangs or ends its ranks is bad; fresh ranks go on with what is missing.
"""

from __future__ import annotations

import json
import math
import pickle
import tempfile
import time
from pathlib import Path
from typing import Any

from ficco.errors import EngineError
from ficco.sweeping.gpu.launching import run_ranks
from ficco.sweeping.gpu.todo import TODO, Todo, layout_of
from ficco.sweeping.points import Case
from ficco.sweeping.simulated import predict
from ficco.sweeping.work import Work

__all__ = ["measure"]

RANK = ("-P", "-m", "ficco.sweeping.gpu.rank")  # what a rank runs, and its folder
_GRACE_S = 60.0  # for ranks to end a round after the deadline


def measure(work: Work) -> bool:
    """Measure all points that are missing; return whether the time sufficed.

    Raises:
        EngineError: ranks ended before they had tried a point.
    """
    _refuse_unfit(work)
    while cases := list(work.remaining()):
        if work.late:
            return False
        session = _Session(work, cases)
        reason = session.run()
        if work.late or session.late:
            return False
        if not reason:
            continue
        tried = [p for case in cases for p in work.able(case) if p.id in session.tries]
        if not tried:
            raise EngineError(f"the ranks ended before they had tried a point: {reason}")
        for point in tried:
            work.refuse(point, f"its ranks ended: {reason}", "failed")
    return True


def _refuse_unfit(work: Work) -> None:
    """Pass over shapes that do not split evenly, and end cases of which no point can run."""
    for case in work.remaining():
        unfit = layout_of(case.shape).unfit
        for point in work.able(case) if unfit else ():
            work.refuse(point, f"{unfit}; on GPUs even shards are swept", "impossible")
        if not work.able(case):
            work.end(case)


class _Session:
    """One set of ranks.

    Attributes:
        tries: ids of the points that they were at when they last said so.
        late: whether they found that the time is up.
    """

    def __init__(self, work: Work, cases: list[Case]) -> None:
        self._work, self._cases = work, {case.shape.id: case for case in cases}
        self._read, self._shape = 0, ""
        self.tries: list[str] = []
        self.late = False

    def run(self) -> str:
        """Run the ranks to their end; return what went wrong, or nothing."""
        work, journal = self._work, self._work.journal
        left = work.left_s
        todo = Todo(
            list(self._cases.values()), work.grid, time.time() + left, work.timeout_s,
            journal.runs, journal.screens, journal.parts, dict.fromkeys(journal.bad, ""),
            set(journal.timelines),
            {point for point, known in journal.worked_out.items() if "dil" in known},
        )  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="ficco-sweep-") as name:
            folder = Path(name)
            (folder / TODO).write_bytes(pickle.dumps(todo))
            command = [*RANK, name]
            limit = left + _GRACE_S if math.isfinite(left) else math.inf
            return run_ranks(command, work.world, folder, limit, lambda: self._watch(folder))

    def _watch(self, folder: Path) -> None:
        """Take over what rank 0 has said since."""
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
                    self.tries = value
                elif kind == "late":
                    self.late = True
                elif kind == "say":
                    self._work.progress.say(value)
                elif kind == "record":
                    self._take(value)

    def _take(self, record: dict[str, Any]) -> None:
        work, case = self._work, self._cases[self._shape]
        if "ended" in record:
            predict(work, case)
            work.end(case)
            self.tries = []
        elif "bad" in record:
            point = next(p for p in case.points if p.id == record["id"])
            work.refuse(point, record["bad"], record["kind"])
        else:
            work.journal.append(self._shape, **record)
            if "ms" in record and "id" in record:
                work.progress.run(self._shape)
