"""`paceline plan`: the options that it prints."""

from __future__ import annotations

import pytest

from paceline.args import yaml_text
from paceline.cli.plan import print_options


@pytest.mark.parametrize(
    "name", ["rocket \U0001f680", "名前", "\\ud83d\\ude00", "tab\tline\n", "\x7f\x85\u2028\ufeff", "# no"]
)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_printed_options_are_those_of_the_run(name: str, encoding: str) -> None:
    """Python's JSON writes one character as a pair of escapes, which YAML reads as two halves of a character."""
    text = print_options({"run_name": name, "seed": 1}, ["run_name"]).encode(encoding, "backslashreplace").decode()
    assert yaml_text.read(text) == {"arguments": {"run_name": name, "seed": 1}}
