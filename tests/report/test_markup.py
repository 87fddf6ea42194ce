"""Texts of a run as HTML."""

from paceline.report.markup import LONG, cell, escape


def test_markup_and_directions_are_inert():
    assert escape("<b>\u202eabc\u2069 \u05e9") == "&lt;b&gt;\ufffdabc\ufffd \u05e9"


def test_a_long_text_makes_its_column_wide():
    assert cell("td", "<b>x</b>", "x" * LONG) == "<td><b>x</b></td>"
    assert cell("th", "x", "x" * (LONG + 1), ' scope="col"') == '<th scope="col" class="long">x</th>'
