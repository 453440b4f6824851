"""Running a worker, whose scenarios run all ranks in one process, on a test double."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from forking import Forked

LIMIT_S = 150


def run_worker(
    worker: Path, scenario: str, given: dict[str, str], words: dict[str, Any], fresh: bool = False
) -> str:
    """Run `python WORKER SCENARIO WORDS`, which must end with "right"; return what it says.

    Args:
        worker: the script.
        scenario: its name.
        given: the environment, of `double_control.environment`.
        words: arguments of the scenario.
        fresh: whether it is a new process, which ends as Python does; else it is forked.
    """
    given = given | {"OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-X", "faulthandler", str(worker), scenario, json.dumps(words)]
    with tempfile.NamedTemporaryFile("r") as said:
        start = subprocess.Popen if fresh else partial(Forked, kind="numpy")
        with open(said.name, "a") as target:
            process = start(command, stdout=target, stderr=subprocess.STDOUT, env=given)
        try:
            code = process.wait(LIMIT_S)
        finally:
            process.kill()
        text = said.read()
    assert code == 0 and text.endswith("right\n"), f"exit {code}: {text[-4000:]}"
    return text
