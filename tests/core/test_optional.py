"""Modules that are imported on first use."""

import copy
import pickle
import sys

from paceline.core.optional import LateModule


def test_a_late_module_is_copied_and_pickled_by_its_name() -> None:
    late = LateModule("colorsys")
    for again in (copy.copy(late), copy.deepcopy(late), pickle.loads(pickle.dumps(late))):
        assert again.rgb_to_hsv(0, 0, 0) == (0, 0, 0)


def test_nothing_is_loaded_by_asking_for_a_special_name() -> None:
    sys.modules.pop("colorsys", None)
    assert not hasattr(LateModule("colorsys"), "__wrapped__")
    assert "colorsys" not in sys.modules
