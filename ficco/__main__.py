"""`python -m ficco` is the command `ficco`; so it runs under torchrun."""

from __future__ import annotations

import sys

from ficco.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
