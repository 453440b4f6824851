"""What the repository promises about itself: tables made from results, no paths of a machine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_readme_tables_are_those_of_the_results() -> None:
    command = [sys.executable, ROOT / "bench" / "readme.py", "--check"]
    done = subprocess.run(command, timeout=60, check=False)
    assert done.returncode == 0, "run `python bench/readme.py`"


def test_readme_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / "README.md").read_text())
    assert len(links) > 5
    for link in links:
        assert (ROOT / link).exists(), link


def test_readme_shows_every_named_schedule() -> None:
    text = (ROOT / "README.md").read_text()
    for path in (ROOT / "schedules" / "named").glob("*.toml"):
        assert f"`{path.stem}`" in text


@pytest.mark.parametrize("script", sorted((ROOT / "bench").glob("*.py")), ids=lambda p: p.stem)
def test_every_benchmark_loads(script: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(script.parent)!r}); import {script.stem}"
    subprocess.run([sys.executable, "-P", "-c", code], timeout=60, check=True)
