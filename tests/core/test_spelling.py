"""The nearest name."""

from __future__ import annotations

from paceline.core.spelling import nearest


def test_nearest_first_then_all():
    assert nearest("momentun", ["nesterov", "momentum"]) == "did you mean 'momentum'? known: momentum, nesterov"
    assert nearest("x", ["nesterov", "momentum"]) == "known: momentum, nesterov"
    assert nearest("x", []) == "known: none"
