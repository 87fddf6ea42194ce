"""The command `paceline`, also as `python -m paceline`."""

import importlib
import sys


def main() -> int:
    """Runs the command of this process. Ctrl-C ends it in one line, also while its modules are imported."""
    try:
        run = importlib.import_module("paceline.cli.main").main
    except KeyboardInterrupt:
        print("\npaceline: interrupted", file=sys.stderr)
        return 130
    return int(run())


if __name__ == "__main__":
    sys.exit(main())
