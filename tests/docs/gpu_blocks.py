"""Write the blocks for GPUs of each page to a file, for a type checker: gpu_blocks.py FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

from blocks import ROOT, blocks_of, pages

# Blocks are short: their functions have no types. For mypy, in the words that it reads.
UNTYPED = "# mypy: allow-untyped-defs, allow-untyped-calls\n"


def main() -> None:
    """Write a file per page; the names of a page's blocks are common to them."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for page in pages():
        blocks = [b for b in blocks_of(page) if b.how == "gpu" and b.language == "python"]
        if blocks:
            name = str(page.relative_to(ROOT).with_suffix("")).replace("/", "_").replace("-", "_")
            text = "\n\n".join([*(block.text for block in blocks), UNTYPED])
            (folder / f"{name}.py").write_text(text)


if __name__ == "__main__":
    main()
