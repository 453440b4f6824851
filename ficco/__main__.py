"""The command `ficco`; as `python -m ficco` it runs under torchrun."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command and return its exit code; Ctrl-C while it is imported ends it, too."""
    try:
        from ficco.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        print("ficco: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
