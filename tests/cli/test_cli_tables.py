"""Tables of text in a terminal, whose wide characters take two columns."""

from __future__ import annotations

from paceline.cli.tables import draw_table
from paceline.core.terminal import width_of


def test_columns_stand_below_each_other_whatever_the_script() -> None:
    rows = [["実験", "1"], ["e\u0301te\u0301", "2"], ["plain", "3"], ["長" * 40, "4"], ["x" * 60, "5"]]
    lines = draw_table(["name", "step"], rows)
    assert [line[-1] for line in lines] == ["p", "1", "2", "3", "4", "5"]
    assert {width_of(line) for line in lines[1:]} == {48 + 2 + 1}
    assert lines[-2].startswith("長" * 22 + "...")
    assert lines[-1].startswith("x" * 45 + "...  ")
