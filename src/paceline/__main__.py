"""The command `paceline`, also as `python -m paceline`."""

import importlib
import sys


def main() -> int:
    """Runs the command of this process. Ctrl-C ends it in one line, also while its modules are imported."""
    try:
        with importlib.import_module("paceline.core.dropped_interrupts").raised_again():
            return int(importlib.import_module("paceline.cli.main").main())
    except KeyboardInterrupt:
        print("\npaceline: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
