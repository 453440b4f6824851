"""Sources without the compiled core, as in a checkout: a plain error, and a doctor that runs."""

from __future__ import annotations

import json
import subprocess
import sys

ABSENT = "import sys; sys.modules['ficco._native'] = None; "  # Python then finds no such module
COMMAND = "from ficco.cli.main import main; sys.exit(main(sys.argv[1:]))"


def python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", ABSENT + code, *args],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_a_call_says_what_is_missing_and_what_to_do() -> None:
    done = python("import ficco; ficco.Node(1)")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ficco.core.errors.EngineError: ")
    assert "a folder of sources without the native core" in last
    assert "change to another folder" in last and "`pip install -e .`" in last


def test_commands_say_it_in_one_line() -> None:
    done = python(COMMAND, "run")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("ficco run: ") and done.stderr.count("\n") == 1
    assert "without the native core" in done.stderr


def test_the_doctor_reports_it() -> None:
    done = python(COMMAND, "doctor", "--json")
    assert done.returncode == 1 and done.stderr == ""
    document = json.loads(done.stdout)
    found = {finding["name"]: finding for finding in document["findings"]}
    assert not document["ok"] and not found["native core"]["ok"] and found["numpy"]["ok"]
    assert "`pip install -e .`" in found["native core"]["do"]
    assert found["CUDA driver"]["found"] == "not checked"


def test_a_core_that_cannot_be_loaded_is_another_error() -> None:
    done = python(
        "import importlib; import ficco\n"
        "def fails(name): raise ImportError('wrong ELF class')\n"
        "ficco.import_module = fails\n"
        "from ficco import _native"
    )
    last = done.stderr.splitlines()[-1]
    assert "cannot be loaded (wrong ELF class); if it was built for another system, install" in last
