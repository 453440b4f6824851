"""What the repository promises about itself: tables made from results, no paths of a machine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forking import run_forked

ROOT = Path(__file__).resolve().parent.parent


PAGES = sorted((ROOT / "docs" / "performance").glob("*.md"))
RESULTS = ROOT / "bench" / "results"


def test_pages_are_those_of_the_results() -> None:
    command = [sys.executable, ROOT / "bench" / "readme.py", "--check"]
    done = subprocess.run(command, timeout=60, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", RESULTS / "README.md", *PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)  # fmt: skip
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", page.read_text())
    assert len(links) > 1
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


def test_every_result_is_shown() -> None:
    """On a page, unless the table of results says that later ones replace it."""
    text = "".join(page.read_text() for page in PAGES)
    listed = (RESULTS / "README.md").read_text()
    for path in RESULTS.glob("*.json"):
        [row] = [line for line in listed.splitlines() if line.startswith(f"| [{path.name}]")]
        assert row.endswith("| superseded |") or f"/{path.name})" in text, path.name


def test_stale_files_are_noticed(tmp_path: Path) -> None:
    """Each file that is written, by a copy whose text was changed by hand; all in one run."""
    shutil.copytree(ROOT / "bench", tmp_path / "bench")
    shutil.copytree(ROOT / "docs" / "performance", tmp_path / "docs" / "performance")
    shutil.copy(ROOT / "README.md", tmp_path)
    command = [sys.executable, tmp_path / "bench" / "readme.py", "--check"]
    fresh = subprocess.run(command, timeout=60, check=False, capture_output=True, text=True)
    assert fresh.returncode == 0, fresh.stdout + fresh.stderr
    written = [page for page in PAGES if "Written by bench/readme.py" in page.read_text()]
    assert len(written) == 9
    figures = sorted(RESULTS.glob("auto_*.svg"))
    files = [ROOT / "README.md", RESULTS / "README.md", *figures, *written]
    for path in files:
        copy = tmp_path / path.relative_to(ROOT)
        text = copy.read_text()
        stale = re.sub(r"(\d)(x|\.json|</text>|%|\.\d| GB/s)", r"9\1\2", text).replace("data ", "")
        assert stale != text, path
        copy.write_text(stale)
    done = subprocess.run(command, timeout=60, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    told = {line.split(" is stale")[0] for line in done.stdout.splitlines()}
    assert told == {str(path.relative_to(ROOT)) for path in files}


def test_readme_shows_every_named_schedule() -> None:
    text = (ROOT / "README.md").read_text()
    for path in (ROOT / "schedules" / "named").glob("*.toml"):
        assert f"`{path.stem}`" in text


@pytest.mark.parametrize("script", sorted((ROOT / "bench").glob("*.py")), ids=lambda p: p.stem)
def test_every_benchmark_loads(script: Path, tmp_path: Path) -> None:
    load = tmp_path / "load.py"
    load.write_text(f"import sys; sys.path.insert(0, {str(script.parent)!r}); import {script.stem}")
    code, said = run_forked(load, folder=tmp_path, environment={}, timeout=60)
    assert code == 0, said
