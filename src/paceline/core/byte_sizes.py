"""Sizes in bytes as text: powers of 1000 for files and disks, powers of 1024 for memory."""

from __future__ import annotations


def format_bytes(num_bytes: float) -> str:
    """Returns the size of files with three significant digits, in powers of 1000: `3.2 GB`."""
    for unit in ("bytes", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"


def format_memory(num_bytes: float) -> str:
    """Returns a size in memory with three significant digits, in powers of 1024: `3.2 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"


def format_mib(num_bytes: int) -> str:
    """Returns a size in memory with one decimal, as in a column of sizes: `1,234.5 MiB`, or KiB below one MiB."""
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:,.1f} KiB"
