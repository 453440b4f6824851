"""What the repository promises about itself: tables made from results, no paths of a machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from forking import run_forked

ROOT = Path(__file__).resolve().parent.parent


PAGES = sorted((ROOT / "docs" / "performance").glob("*.md"))
RESULTS = ROOT / "bench" / "results"
COMMIT = re.compile(r"[0-9a-f]{40}(\+changes)?")


def test_pages_are_those_of_the_results() -> None:
    command = [sys.executable, ROOT / "bench" / "readme.py", "--check"]
    done = subprocess.run(command, timeout=60, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_links_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), RESULTS / "README.md", *PAGES]
    links = [
        (page.parent, link)
        for page in pages
        for link in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", page.read_text())
    ]
    assert len(links) > 2 * len(PAGES)
    assert not [(folder, link) for folder, link in links if not (folder / link).exists()]


def test_every_result_is_shown() -> None:
    """On a page, unless the table of results says that later ones replace it."""
    text = "".join(page.read_text() for page in PAGES)
    listed = (RESULTS / "README.md").read_text()
    for path in RESULTS.glob("*.json"):
        [row] = [line for line in listed.splitlines() if line.startswith(f"| [{path.name}]")]
        assert row.endswith("| superseded |") or f"/{path.name})" in text, path.name


def test_every_result_names_its_commit() -> None:
    """A new result must; those from before the rule are listed, with the commit that added them."""
    earlier = tomllib.loads((RESULTS / "earlier.toml").read_text())
    named = {
        path.name: json.loads(path.read_text()).get("commit") for path in RESULTS.glob("*.json")
    }
    without = {name for name, commit in named.items() if commit is None}
    assert without == set(earlier), "measure again in a checkout: bench/record.py names the commit"
    wrong = [name for name, commit in named.items() if commit and not COMMIT.fullmatch(commit)]
    assert not wrong and all(re.fullmatch("[0-9a-f]{8}", commit) for commit in earlier.values())


def test_a_benchmark_names_the_commit_or_refuses(tmp_path: Path) -> None:
    """In a checkout with and without changes; in a folder without history; from the variable."""

    def made(folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
        program = "import record; print(record.surroundings()['commit'])"
        environment = {k: v for k, v in os.environ.items() if k != "BENCH_COMMIT"}
        return subprocess.run(
            [sys.executable, "-c", program], cwd=folder / "bench", env=environment | more,
            timeout=60, check=False, capture_output=True, text=True,
        )  # fmt: skip

    (tmp_path / "bench").mkdir()
    shutil.copy(ROOT / "bench" / "record.py", tmp_path / "bench")
    refused = made(tmp_path)
    assert refused.returncode == 1 and "set BENCH_COMMIT to the output" in refused.stderr
    assert made(tmp_path, BENCH_COMMIT="1" * 40).stdout.strip() == "1" * 40
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(tmp_path)]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True, timeout=60)
    found = made(tmp_path).stdout.strip()
    assert re.fullmatch("[0-9a-f]{40}", found), found
    (tmp_path / "bench" / "record.py").write_text((tmp_path / "bench/record.py").read_text() + "\n")
    assert made(tmp_path).stdout.strip() == f"{found}+changes"


def test_stale_files_are_noticed(tmp_path: Path) -> None:
    """Each file that is written, by a copy whose text was changed by hand; all in one run."""
    shutil.copytree(ROOT / "bench", tmp_path / "bench")
    shutil.copytree(ROOT / "docs" / "performance", tmp_path / "docs" / "performance")
    by_hand = [ROOT / "README.md", ROOT / "docs" / "quickstart.md"]  # with parts that are written
    for page in by_hand:
        shutil.copy(page, tmp_path / page.relative_to(ROOT))
    command = [sys.executable, tmp_path / "bench" / "readme.py", "--check"]
    fresh = subprocess.run(command, timeout=60, check=False, capture_output=True, text=True)
    assert fresh.returncode == 0, fresh.stdout + fresh.stderr
    written = [page for page in PAGES if "Written by bench/readme.py" in page.read_text()]
    assert len(written) == 11
    figures = sorted(RESULTS.glob("auto_*.svg"))
    files = [*by_hand, RESULTS / "README.md", *figures, *written]
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


def test_ties_and_causes_of_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference within the larger IQR is a tie; each loss of `auto` has the cause it has."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from tables import gains, losses

    def row(median: float, iqr: float) -> dict[str, float]:
        return {"median": median, "iqr": iqr}

    slow, fast, noisy = row(22.0, 0.3), row(21.0, 0.3), row(21.9, 0.4)
    assert gains.range_text([gains.gain_of([fast], [slow]), None]) == "1.05x"
    assert gains.range_text([gains.gain_of([fast], [slow]), gains.gain_of([slow], [noisy])]) == (
        "tie to 1.05x"
    )
    assert gains.gain_of([], [slow]) is None and gains.range_text([None]) == "-"

    document = json.loads((RESULTS / "regret_h100x4.json").read_text())
    found = losses.lost(document, "captured")
    outside = [
        case for case in document["cases"] if not case["verdicts"]["captured"]["within"]
    ]  # fmt: skip
    assert sum(map(len, found.values())) == len(outside) > 0
    for case in found[losses.PREDICTED]:
        assert case["verdicts"]["captured"]["best"].startswith("serial")
        assert not losses.taken(case, "captured").startswith("serial")
    for case in losses.lost(document, "eager")[losses.EAGER]:
        assert case["verdicts"]["captured"]["within"]
