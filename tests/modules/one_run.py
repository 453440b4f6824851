"""Many checks in one set of ranks, with a test for each check.

To start ranks takes longer than most checks. The first test of a run starts the ranks with the
checks of all its selected tests. The others read what the ranks wrote, in other processes of
pytest-xdist too.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from pathlib import Path

import pytest
from ranks_of_torch import Output, output_of

END = "end"  # a test whose name is not that of a check: whether the ranks ended well


class OneRun:
    """A run of a worker's checks.

    Args:
        name: of the run, different from that of any other.
        worker, world: see `output_of`. The worker writes "CHECK: 0.1 s" after each check.
        checks: their names, in order.
    """

    def __init__(self, name: str, worker: str, world: int, *checks: str) -> None:
        self.name, self._worker, self._world = name, worker, world
        self.checks = checks

    def __repr__(self) -> str:
        return self.name

    @property
    def tests(self) -> list[object]:
        """Parameters (run, check) of a test."""
        return [
            pytest.param(self, check, id=f"{self.name}-{check}") for check in (*self.checks, END)
        ]

    def judge(self, check: str, request: pytest.FixtureRequest) -> None:
        """Fail if a check was not right on a rank, or was not reached."""
        output = self._output(request)
        if check == END:
            assert output.code == 0, output.said
        for rank, words in enumerate(output.ranks):
            done = re.findall(r"^(\w+): [\d.]+ s$", words, re.MULTILINE)
            right = output.ended_well(rank) if check == END else check in done
            after = f"the last check that was right: {done[-1]}" if done else "no check was right"
            assert right, f"rank {rank}, {after}\n{words}{output.said}"

    def _output(self, request: pytest.FixtureRequest) -> Output:
        """Return what the ranks wrote; start them if no test has."""
        base = request.getfixturevalue("tmp_path_factory").getbasetemp()
        if "PYTEST_XDIST_WORKER" in os.environ:
            base = base.parent
        folder = Path(base) / f"run-{self.name.replace(' ', '-')}"
        folder.mkdir(exist_ok=True)
        result = folder / "output.json"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not result.exists():
                output = output_of(
                    self._worker, self._world, folder, checks=self._selected(request)
                )
                result.write_text(json.dumps(output))
        return Output(*json.loads(result.read_text()))

    def _selected(self, request: pytest.FixtureRequest) -> list[str]:
        """Return the checks whose tests are part of this session, in order."""
        asked = set()
        for item in request.session.items:
            parameters = getattr(item, "callspec", None)
            if parameters is not None and parameters.params.get("run") is self:
                asked.add(parameters.params["check"])
        return [check for check in self.checks if check in asked]
