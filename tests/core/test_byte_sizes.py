"""Sizes as text, in powers of 1000 and of 1024."""

from __future__ import annotations

import pytest

from paceline.core.byte_sizes import format_bytes, format_memory, format_mib


@pytest.mark.parametrize(
    ("number", "text"), [(12, "12 bytes"), (5000, "5 kB"), (804_000_000, "804 MB"), (3.25e12, "3.25e+03 GB")]
)
def test_sizes_of_files(number: float, text: str) -> None:
    assert format_bytes(number) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.46 KiB"), (3 << 20, "3 MiB"), (5 << 40, "5 TiB")]
)
def test_sizes_in_memory(number: float, text: str) -> None:
    assert format_memory(number) == text


@pytest.mark.parametrize(("number", "text"), [(1433, "1.4 KiB"), (4 << 20, "4.0 MiB"), (5 << 30, "5,120.0 MiB")])
def test_sizes_of_a_column(number: int, text: str) -> None:
    assert format_mib(number) == text
