"""Run the blocks of one page in this process: `page_runner.py PAGE HOW`, in the page's folder.

HOW is "run" (all blocks that run in one process, files included), "ranks" or "gpu" (this process is
one rank; the environment has RANK and WORLD_SIZE). Names of a block stay known to the next one.
Rank 0 alone runs commands for GPUs: they start their own ranks.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from blocks import Block, blocks_of

_FAILED = 1
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main() -> int:
    """Run the blocks; the exit code is 1 at the first that fails."""
    page, how = Path(sys.argv[1]), sys.argv[2]
    names: dict[str, object] = {"__name__": "__main__"}
    said = ""
    for block in blocks_of(page):
        if block.how == "file" and how == "run":
            Path(block.argument).write_text(block.text)
        elif block.how == "output" and how == "run":
            if not matches(block.text, said):
                print(f"{block}: the output is not as shown. It is:\n{said}", file=sys.stderr)
                return _FAILED
        elif block.how == how and (block.language != "sh" or os.environ.get("RANK", "0") == "0"):
            said = _shell(block) if block.language == "sh" else _python(block, names)
    return 0


def matches(shown: str, said: str) -> bool:
    """Return whether an output is as a page shows it; `...` stands for any text.

    PyTorch before 2.10 says on stdout how gloo connects; these lines do not count.
    """
    # Ranks may write these lines at the same time, so a line can begin in the middle of another.
    of_gloo = re.compile(r"\[Gloo\] |connected peer ranks is :")
    said = "\n".join(line for line in said.splitlines() if not of_gloo.search(line))
    pattern = re.escape(" ".join(shown.split())).replace(re.escape("..."), ".*?")
    return re.fullmatch(pattern, " ".join(said.split()), re.DOTALL) is not None


def _python(block: Block, names: dict[str, object]) -> str:
    printed = io.StringIO()
    code = compile("\n" * block.line + block.text, str(block.page), "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


def _shell(block: Block) -> str:
    alone = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text], env=alone | {"COLUMNS": "88"},
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{block}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
