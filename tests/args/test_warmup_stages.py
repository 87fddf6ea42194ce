"""The stages of a warm-up along a line: one for each value or step, whichever are fewer, and never without bound."""

from __future__ import annotations

import pytest

from paceline.args.warmups import rising_stages


@pytest.mark.parametrize("start", [1, 3, 8])
@pytest.mark.parametrize("end", [8, 9, 100, 1001])
@pytest.mark.parametrize("num_steps", [1, 7, 50, 2000])
@pytest.mark.parametrize("multiple", [1, 8])
def test_each_step_has_the_largest_value_below_the_line(start: int, end: int, num_steps: int, multiple: int) -> None:
    stages = dict(rising_stages(start, end, num_steps, multiple))
    value = start
    for step in range(num_steps + 1):
        value = stages.get(step, value)
        line = start + step * (end - start) // num_steps
        assert value == max(start, line // multiple * multiple)


def test_absurd_ends_take_no_longer() -> None:
    assert len(rising_stages(1, 10**12, 10)) == 11
    with pytest.raises(ValueError, match="more than 1,000,000 stages"):
        rising_stages(1, 10**12, 10**12)
