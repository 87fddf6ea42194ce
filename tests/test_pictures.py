"""The pictures of a run: their terminal is drawn as text on a grid."""

import xml.etree.ElementTree as ElementTree

import pytest

import pictures

SPACE = "{http://www.w3.org/2000/svg}"


def test_a_screen_is_drawn_line_by_line():
    root = ElementTree.fromstring(pictures.svg(["a <b> & c", "  loss 1"], 80))
    texts = root.findall(f"{SPACE}text")
    assert [text.text.replace(pictures.NO_BREAK, " ") for text in texts] == ["a <b> & c", "  loss 1"]
    assert [float(text.get("textLength")) for text in texts] == pytest.approx([9 * pictures.CELL, 8 * pictures.CELL])
    assert root.get("viewBox") == "0 0 700 66"
    assert root.find(f"{SPACE}title").text == "a <b> & c\n  loss 1"


def test_the_moment_of_the_picture_is_a_whole_frame():
    row, bar, values = f"{pictures.TAKEN_AT}  loss 1", "train: 1/2 [", "  loss 1"
    assert pictures.is_moment([row, bar, values, ""])
    assert not pictures.is_moment([row, bar, ""])
    assert not pictures.is_moment([row, values, "evaluate: 1/2"])
    assert not pictures.is_moment([bar, values])


def test_the_pictures_exist():
    for columns in (80, 200):
        root = ElementTree.parse(pictures.DOCS / f"run_{columns}.svg").getroot()
        texts = [text.text.replace(pictures.NO_BREAK, " ") for text in root.findall(f"{SPACE}text")]
        assert pictures.is_moment(texts)
        assert max(map(len, texts)) <= columns
