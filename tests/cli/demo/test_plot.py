"""Drawings: every value finds its place, and nothing breaks on odd numbers."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.demo.plot import LARGEST, draw_curve, draw_table

points = st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(allow_nan=True, allow_infinity=True)), max_size=30)


@given(points, points, st.booleans())
def test_any_points_give_a_drawing_of_the_size_asked_for(line, marks, unicode):
    drawing = draw_curve(line, marks, width=30, height=5, unicode=unicode)
    if any(abs(y) <= LARGEST for _, y in [*line, *marks]):
        assert len(drawing.splitlines()) == 5 + 3
    else:
        assert "nothing to draw" in drawing


def test_a_falling_line_starts_high_and_ends_low():
    lines = draw_curve([(0, 10.0), (100, 0.0)], width=20, height=5).splitlines()
    area = [line.split("┤")[-1].split("│")[-1] for line in lines[:5]]
    assert area[0].startswith("⠉") or area[0][0] != " "
    assert area[-1].rstrip()[-1] != " "
    assert len(area[-1].rstrip()) == 20
    assert "10" in lines[0]
    assert "100 step" in lines[6]


def test_marks_are_drawn_over_the_line_and_named():
    drawing = draw_curve([(0, 1.0), (10, 0.0)], [(5, 0.5)], width=21, height=5)
    assert drawing.count("●") == 2  # one in the drawing, one in the legend
    assert "held out" in drawing
    assert "held out" not in draw_curve([(0, 1.0), (10, 0.0)])


def test_ascii_only_where_asked():
    assert draw_curve([(0, 1.0), (10, 0.0)], [(5, 0.5)], unicode=False).isascii()


def test_a_single_point_is_drawn():
    assert "⠒⠒ training" in draw_curve([(3, 2.0)])


def test_a_table_shows_errors_and_hides_other_zeros():
    table = draw_table([[12, 0], [3, 0]], ["cat", "dog"])
    assert table.splitlines() == ["      cat dog", "cat    12   .", "dog     3   0"]
