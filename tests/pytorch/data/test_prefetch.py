"""Moving nested batches; the meta device stands in for an accelerator."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from paceline.pytorch.data.prefetch import DevicePrefetcher, move_to_device

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Row:
    x: torch.Tensor
    name: str = "row"


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.zeros(2), "y": torch.zeros(2)},
        {"x": torch.zeros(2), "inner": [{"y": torch.zeros(1)}, "text", 3, None]},
        Pair(torch.zeros(1), (torch.zeros(1),)),
        Row(torch.zeros(1)),
        torch.zeros(1),
    ],
)
def test_nothing_to_move_gives_the_same_object(batch: Any) -> None:
    assert move_to_device(batch, torch.device("cpu")) is batch
    assert move_to_device(batch, "cpu") is batch
    assert DevicePrefetcher("cpu")(batch) is batch


def test_moved_batches_keep_their_types() -> None:
    batch = {"pair": Pair(torch.zeros(1), [torch.zeros(2)]), "row": Row(torch.zeros(1)), "text": "a", "n": 3}
    moved = move_to_device(batch, "meta")
    assert moved["pair"].x.device.type == moved["pair"].y[0].device.type == moved["row"].x.device.type == "meta"
    assert isinstance(moved["pair"], Pair)
    assert isinstance(moved["row"], Row)
    assert (moved["row"].name, moved["text"], moved["n"]) == ("row", "a", 3)
    assert batch["pair"].x.device.type == "cpu"  # the batch itself is not changed


def test_only_what_has_to_move_is_made_anew() -> None:
    there = torch.zeros(1, device="meta")
    moved = move_to_device({"there": there, "list": [there], "here": torch.zeros(1)}, "meta")
    assert moved["there"] is there
    assert moved["list"][0] is there
    assert moved["here"].device.type == "meta"


def test_library_types() -> None:
    transformers = pytest.importorskip("transformers")
    outputs = pytest.importorskip("transformers.modeling_outputs")
    encoding = transformers.BatchEncoding({"input_ids": torch.zeros(1, 2)})
    moved = move_to_device(encoding, "meta")
    assert isinstance(moved, transformers.BatchEncoding)
    assert moved["input_ids"].device.type == "meta"
    assert encoding["input_ids"].device.type == "cpu"
    moved = move_to_device(outputs.SequenceClassifierOutput(logits=torch.zeros(1, 2)), "meta")
    assert isinstance(moved, outputs.SequenceClassifierOutput)
    assert moved.logits.device.type == "meta"
    packed = torch.nn.utils.rnn.pack_sequence([torch.zeros(2, 3), torch.zeros(1, 3)])
    assert move_to_device({"packed": packed}, "cpu")["packed"].data.shape == (3, 3)


@pytest.mark.gpu
def test_prefetcher_on_an_accelerator() -> None:
    if not torch.accelerator.is_available():
        pytest.skip("needs an accelerator")
    device = torch.accelerator.current_accelerator()
    assert device is not None
    prefetch = DevicePrefetcher(device)
    for step in range(50):
        batch = {"x": torch.full((1000, 1000), float(step)).pin_memory()}
        moved = prefetch(batch)
        assert moved["x"].device.type == device.type
        assert float((moved["x"] * 2).mean()) == 2.0 * step
