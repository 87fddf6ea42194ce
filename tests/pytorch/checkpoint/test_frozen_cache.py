"""The fingerprint of weights that do not train: it shows what changed, wherever it is and wherever it went."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.pytorch.checkpoint import frozen_cache
from paceline.pytorch.checkpoint.frozen_cache import fingerprint, mixed_sums

# on the host, and as it is done on a device
WAYS: list[Callable[[Tensor], bytes]] = [fingerprint, lambda tensor: mixed_sums(tensor.contiguous().view(-1))]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_cache, "_HOST_PIECE", 4096)
    monkeypatch.setattr(frozen_cache, "_DEVICE_PIECE", 4096)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8])
def test_rows_and_columns_that_change_places_show(way: Callable[[Tensor], bytes], dtype: torch.dtype) -> None:
    eye = torch.eye(70, 130).to(dtype)
    swapped = eye[torch.tensor([2, 1, 0, *range(3, 70)])]
    assert way(swapped) != way(eye)
    assert way(eye[:, torch.randperm(130, generator=torch.Generator().manual_seed(0))]) != way(eye)
    assert way(eye.clone()) == way(eye)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_signs_that_change_places_show(way: Callable[[Tensor], bytes]) -> None:
    """They differ in the highest bit of a word alone."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        signs = (torch.randint(0, 2, (1500,), generator=generator) * 2 - 1).to(dtype)
        prints = {way(signs)}
        places = torch.randperm(1500, generator=generator).tolist()
        pairs = [(one, two) for one, two in zip(places[::2], places[1::2], strict=True) if signs[one] != signs[two]]
        for one, two in pairs:
            changed = signs.clone()
            changed[one], changed[two] = signs[two], signs[one]
            prints.add(way(changed))
        assert len(prints) == len(pairs) + 1


@given(st.binary(min_size=1, max_size=9000), st.data())
def test_one_changed_bit_shows(content: bytes, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[place] ^= 1 << data.draw(st.integers(0, 7))
    for way in WAYS:
        one = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        other = torch.frombuffer(changed, dtype=torch.uint8)
        assert way(one) != way(other)
        assert way(one) == way(torch.frombuffer(bytearray(b"." + content), dtype=torch.uint8)[1:])


def test_shape_and_type_belong_to_it() -> None:
    zeros = torch.zeros(6, 4)
    others = [zeros.view(4, 6), zeros.int(), zeros[:3], torch.zeros(0, 4), torch.zeros(4, 0), torch.tensor(0.0)]
    assert len({fingerprint(tensor) for tensor in [zeros, *others]}) == 7
    assert fingerprint(zeros.t()) == fingerprint(zeros.t().contiguous())
