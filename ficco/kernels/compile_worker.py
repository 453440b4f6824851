"""A process that compiles variants: python -m ficco.kernels.compile_worker CAPABILITY FOLDER.

Variants arrive as lines of standard input (`Variant.text`). For each, the worker writes KEY.cubin
and KEY.ptx to the folder, and then the record KEY.json; or KEY.error with the reason why native
code cannot launch the variant. Triton's own cache is used according to its settings.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ficco.errors import EngineError
from ficco.kernels.compiling import compile_variant
from ficco.kernels.variants import Variant

__all__ = ["main"]


def main(capability: int, folder: Path) -> None:
    """Compile the variants from standard input."""
    for line in sys.stdin.read().splitlines():
        variant = Variant.of_text(line)
        stem = folder / variant.key
        try:
            compiled = compile_variant(variant, capability)
        except EngineError as error:
            _write(stem.with_suffix(".error"), str(error))
            continue
        stem.with_suffix(".cubin").write_bytes(compiled.cubin)
        stem.with_suffix(".ptx").write_text(compiled.ptx)
        _write(stem.with_suffix(".json"), json.dumps(compiled.record, sort_keys=True))


def _write(path: Path, text: str) -> None:
    """Write a file atomically."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
