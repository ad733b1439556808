"""The command line: one small file per command, and one place where errors become exit codes."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `outrider` command."""
    try:
        from outrider.cli.app import app
        from outrider.cli.errors import run
    except KeyboardInterrupt:  # during the imports: no traceback either
        sys.exit(130)
    sys.exit(run(app, sys.argv[1:]))
