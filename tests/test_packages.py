"""What a package promises: one version, types for its users, and its data beside its code.

These tests hold the package that is installed: in CI, a wheel. `.ci/packages` builds the packages
of a release and checks them.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import ficco

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(ficco.__file__).resolve().parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_written_once() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"] and "version" not in PROJECT["project"]
    source = PROJECT["tool"]["scikit-build"]["metadata"]["version"]["input"]
    written = re.findall(r'^__version__ = "(.+)"$', (ROOT / source).read_text(), re.MULTILINE)
    assert written == [ficco.__version__]
    assert importlib.metadata.version("ficco") == ficco.__version__, "install ficco again"


def test_the_command_prints_the_version() -> None:
    command = [sys.executable, "-P", "-m", "ficco", "--version"]
    printed = subprocess.run(command, timeout=60, check=True, capture_output=True, text=True).stdout
    assert printed == f"ficco {ficco.__version__}\n"


def test_licences_of_others_are_in_the_packages() -> None:
    """That of nanobind, whose headers are compiled in, and of Triton, which compiled the packs."""
    kept = importlib.metadata.metadata("ficco").get_all("License-File")
    assert kept == ["LICENSE", "NOTICE"], "install ficco again"
    notice = (ROOT / "NOTICE").read_text()
    assert "Copyright (c) 2022 Wenzel Jakob" in notice
    terms = importlib.metadata.distribution("triton").read_text("licenses/LICENSE")
    assert terms and terms.strip() in notice


def test_type_checkers_read_its_annotations() -> None:
    assert (PACKAGE / "py.typed").read_bytes() == b""
    assert (PACKAGE / "_native.pyi").is_file()


def test_all_files_of_the_package_are_installed() -> None:
    """Also those that are no modules: packs of kernels, the template of a report."""
    files = [path for path in (ROOT / "ficco").rglob("*") if path.is_file()]
    names = {str(path.relative_to(ROOT / "ficco")) for path in files if path.suffix != ".pyc"}
    assert {"kernels/packs/sm_90.zip", "cli/report/sweep/page.html"} <= names
    assert not {name for name in names if not (PACKAGE / name).is_file()}


def test_data_are_found_outside_of_the_repository(tmp_path: Path) -> None:
    kinds = ("machines", "named", "sweeps", "tuned")
    code = (
        "import json; from ficco.core import data; from ficco.kernels import pack\n"
        f"found = {{kind: data.names(kind) for kind in {kinds}}}\n"
        "print(json.dumps([found, pack.capabilities(), str(data._root())]))"
    )
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(
        command, timeout=60, check=True, capture_output=True, text=True, cwd=tmp_path
    )
    found, capabilities, root = json.loads(done.stdout)
    for kind in kinds:
        shipped = sorted(path.stem for path in (ROOT / "schedules" / kind).glob("*.toml"))
        assert found[kind] == shipped != []
    assert capabilities == [80, 90]
    # An editable install reads the repository; a wheel has its own copy.
    assert Path(root).parent == (ROOT if PACKAGE.parent == ROOT else PACKAGE)


def test_the_backend_of_native_code_is_not_a_later_one() -> None:
    """Another major release of nanobind's backend has another binary interface."""
    found = [name for name in PROJECT["project"]["dependencies"] if "nanobind-backend" in name]
    assert len(found) == 1 and "<" in found[0]


def test_a_second_import_says_that_it_is_one(torch: object) -> None:
    program = (
        "import sys, ficco\nficco.Node\n"
        "for name in [*sys.modules]:\n"
        "    if name.partition('.')[0] == 'ficco': del sys.modules[name]\n"
        "import ficco\n"
        "try:\n    ficco.Node\n"
        "except ficco.EngineError as error:\n    print(error)\n"
    )
    command = [sys.executable, "-P", "-c", program]
    said = subprocess.run(command, timeout=60, check=True, capture_output=True, text=True).stdout
    assert "removed from sys.modules" in said and "start a new process" in said, said
