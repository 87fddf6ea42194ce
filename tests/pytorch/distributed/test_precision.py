"""Outputs in 16 bits, widened: the values in float32, the containers as their author chose them."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.pytorch.distributed.precision import widen, widened

HALF, WHOLE = torch.ones(2, dtype=torch.bfloat16), torch.arange(2)


@dataclass
class Output:
    logits: Tensor
    ids: Tensor
    note: str = "kept"


Named = namedtuple("Named", ["logits", "ids"])


@pytest.mark.parametrize(
    "outputs",
    [
        {"logits": HALF, "ids": WHOLE},
        OrderedDict(logits=HALF, ids=WHOLE),
        Output(HALF, WHOLE, "other"),
        Named(HALF, WHOLE),
        (HALF, WHOLE),
        [HALF.half(), WHOLE],
        ([{"deep": HALF}], WHOLE),
    ],
)
def test_the_container_stays(outputs: Any) -> None:
    wide = widen(outputs)
    assert type(wide) is type(outputs)
    values = list(vars(wide).values()) if isinstance(wide, Output) else list(getattr(wide, "values", lambda: wide)())
    first = values[0][0]["deep"] if isinstance(values[0], list) else values[0]
    assert first.dtype == torch.float32
    assert values[1] is WHOLE
    assert values[2:] in ([], ["other"])


@pytest.mark.parametrize("outputs", [None, "text", 3, (WHOLE, None), {"a": WHOLE.double()}, Output(WHOLE, WHOLE)])
def test_what_needs_no_change_is_the_same_object(outputs: Any) -> None:
    assert widen(outputs) is outputs


def test_a_model_output_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.modeling_outputs")
    outputs = modeling.SequenceClassifierOutput(logits=HALF.requires_grad_(), hidden_states=(HALF, HALF))
    wide = widen(outputs)
    assert type(wide) is type(outputs)
    assert list(wide) == ["logits", "hidden_states"]
    assert wide.logits.dtype == wide["logits"].dtype == wide.hidden_states[1].dtype == torch.float32
    wide.logits.sum().backward()
    assert HALF.grad is not None


def test_a_model_is_widened_for_a_while() -> None:
    model = nn.Linear(2, 2).bfloat16()
    with widened(model):
        assert model(torch.ones(1, 2, dtype=torch.bfloat16)).dtype == torch.float32
    assert model(torch.ones(1, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16
