"""States as JSON and back."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from paceline.pytorch.data.portable import from_portable, to_portable


@pytest.mark.parametrize(
    "value",
    [None, 1, 1.5, "a", [1, [2]], (1, (2, "b")), {"a": (1,)}, {1: "a", "b": 2}, b"\x00\xff", {"__kind__": "mine"}],
)
def test_round_trip(value: Any) -> None:
    assert from_portable(json.loads(json.dumps(to_portable(value)))) == value


def test_round_trip_of_arrays() -> None:
    value = {"t": torch.arange(3, dtype=torch.uint8), "a": np.arange(3, dtype=np.float32), "n": np.int64(4)}
    back = from_portable(json.loads(json.dumps(to_portable(value))))
    assert torch.equal(back["t"], value["t"])
    assert back["t"].dtype == torch.uint8
    assert back["a"].dtype == np.float32
    assert back["n"] == 4


def test_what_has_no_form_is_named() -> None:
    with pytest.raises(TypeError, match="object"):
        to_portable({"x": object()})
