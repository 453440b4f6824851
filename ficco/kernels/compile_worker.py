"""One process that compiles variants: python -m ficco.kernels.compile_worker CAPABILITY FOLDER.

Variants come as lines of the standard input, `Variant.text`. Each makes the files KEY.cubin and
KEY.ptx in the folder, and then KEY.json, the record; or KEY.error, why native code cannot launch
it. Triton's own cache is used as its settings say.
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
    """Compile what the standard input names."""
    for line in sys.stdin.read().splitlines():
        variant = Variant.of_text(line)
        stem = folder / variant.key
        try:
            made = compile_variant(variant, capability)
        except EngineError as error:
            _write(stem.with_suffix(".error"), str(error))
            continue
        stem.with_suffix(".cubin").write_bytes(made.cubin)
        stem.with_suffix(".ptx").write_text(made.ptx)
        _write(stem.with_suffix(".json"), json.dumps(made.record, sort_keys=True))


def _write(path: Path, text: str) -> None:
    """Write a file that is complete when it is there."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
