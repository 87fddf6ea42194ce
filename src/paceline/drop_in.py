"""Drop-in replacement for scripts and libraries that use transformers: `install()`, `python -m paceline.drop_in`."""

import sys

from paceline.compat.drop_in import find_pairs, install, installed, is_installed, main, uninstall

__all__ = ["find_pairs", "install", "installed", "is_installed", "main", "uninstall"]

if __name__ == "__main__":
    sys.exit(main())
