"""The sweep's side of a measurement on GPUs: starts ranks, keeps the journal, starts them anew.

A point that hangs or ends its ranks is bad, a part or a trace that does is not to be had; fresh
ranks go on with what is missing.
"""

from __future__ import annotations

import json
import math
import pickle
import time
from pathlib import Path
from typing import Any

from ficco import temporary
from ficco.errors import EngineError
from ficco.sweeping.gpu.launching import run_ranks
from ficco.sweeping.gpu.worklist import TODO, Todo, layout_of
from ficco.sweeping.points import Case
from ficco.sweeping.simulated import predict
from ficco.sweeping.work import Work

__all__ = ["measure"]

RANK = ("-P", "-m", "ficco.sweeping.gpu.rank")  # what a rank runs, and its folder
_GRACE_S = 60.0  # for ranks to end a round after the deadline


def measure(work: Work) -> bool:
    """Measure all points that are missing; return whether the time sufficed.

    Raises:
        EngineError: ranks ended before they had tried anything.
    """
    _refuse_unfit(work)
    while cases := list(work.remaining()):
        if work.late:
            return False
        session = _Session(work, cases)
        reason = session.run()
        if reason and not any(work.remaining()):
            work.progress.say(f"the ranks ended badly, with nothing left to measure: {reason}")
            break
        if work.late or session.late:
            return False
        if reason:
            session.blame(reason)
            _end_hopeless(work)
    return True


def _refuse_unfit(work: Work) -> None:
    """Pass over shapes that do not split evenly."""
    for case in work.remaining():
        unfit = layout_of(case.shape).unfit
        for point in work.able(case) if unfit else ():
            work.refuse(point, f"{unfit}; on GPUs even shards are swept", "impossible")
    _end_hopeless(work)


def _end_hopeless(work: Work) -> None:
    """End cases of which no point can run, so that no ranks start for their parts."""
    for case in work.remaining():
        if not work.able(case):
            work.end(case)


class _Session:
    """One set of ranks.

    Attributes:
        tries: ids of the points that they were at when they last said so.
        part: the part or the trace that they were at instead, if it was one.
        late: whether they found that the time is up.
    """

    def __init__(self, work: Work, cases: list[Case]) -> None:
        self._work, self._cases = work, {case.shape.id: case for case in cases}
        self._read, self._shape = 0, ""
        self._gained = False
        self.tries: list[str] = []
        self.part = ""
        self.late = False

    def run(self) -> str:
        """Run the ranks to their end; return what went wrong, or nothing."""
        work, journal = self._work, self._work.journal
        left = work.left_s
        todo = Todo(
            list(self._cases.values()), work.grid, time.time() + left, work.timeout_s,
            journal.runs, journal.screens, journal.parts, dict.fromkeys(journal.bad, ""),
            journal.checked, journal.lacking, set(journal.timelines),
            {point for point, known in journal.worked_out.items() if "dil" in known},
        )  # fmt: skip
        with temporary.folder("ficco-sweep-") as folder:
            (folder / TODO).write_bytes(pickle.dumps(todo))
            command = [*RANK, str(folder)]
            limit = left + _GRACE_S if math.isfinite(left) else math.inf
            return run_ranks(command, work.world, folder, limit, lambda: self._watch(folder))

    def blame(self, reason: str) -> None:
        """Write down that what the ranks were at ended them, so that it is not tried again.

        Raises:
            EngineError: they were at nothing, and nothing new is known: others would fare alike.
        """
        work, said = self._work, f"its ranks ended: {reason}"
        if self.part:
            work.lack(self._cases[self._shape], self.part, said)
            return
        tried = [p for c in self._cases.values() for p in work.able(c) if p.id in self.tries]
        for point in tried:
            work.refuse(point, said, "failed")
        if not tried and not self._gained:
            raise EngineError(f"the ranks ended before they had tried a point: {reason}")

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
        if set(record) != {"id", "error"}:  # fresh ranks check a result again
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
