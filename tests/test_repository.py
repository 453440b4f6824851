"""What the repository promises about itself: tables made from results, no paths of a machine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_readme_tables_are_those_of_the_results() -> None:
    command = [sys.executable, ROOT / "bench" / "readme.py", "--check"]
    done = subprocess.run(command, timeout=60, check=False)
    assert done.returncode == 0, "run `python bench/readme.py`"


@pytest.mark.parametrize("page", ["README.md", "bench/RESULTS.md"])
def test_links_lead_somewhere(page: str) -> None:
    file = ROOT / page
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", file.read_text())
    assert len(links) > 5
    for link in links:
        assert (file.parent / link).exists(), link


def test_every_result_is_shown() -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "bench" / "RESULTS.md").read_text()
    for path in (ROOT / "bench" / "results").glob("*.json"):
        assert path.name in text, path.name


def test_a_stale_page_is_noticed(tmp_path: Path) -> None:
    """Of both files, by a copy whose figures were changed by hand."""
    for stale in ("README.md", "bench/RESULTS.md"):
        copy = tmp_path / stale.replace("/", "-")
        shutil.copytree(ROOT / "bench", copy / "bench")
        shutil.copy(ROOT / "README.md", copy)
        command = [sys.executable, copy / "bench" / "readme.py", "--check"]
        fresh = subprocess.run(command, timeout=60, check=False, capture_output=True, text=True)
        assert fresh.returncode == 0, fresh.stderr
        page = copy / stale
        page.write_text(page.read_text().replace("1.06x", "9.06x"))
        assert subprocess.run(command, timeout=60, check=False).returncode == 1, stale


def test_readme_shows_every_named_schedule() -> None:
    text = (ROOT / "README.md").read_text()
    for path in (ROOT / "schedules" / "named").glob("*.toml"):
        assert f"`{path.stem}`" in text


@pytest.mark.parametrize("script", sorted((ROOT / "bench").glob("*.py")), ids=lambda p: p.stem)
def test_every_benchmark_loads(script: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(script.parent)!r}); import {script.stem}"
    subprocess.run([sys.executable, "-P", "-c", code], timeout=60, check=True)
