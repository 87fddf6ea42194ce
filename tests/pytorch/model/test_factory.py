"""Models that cannot be trained are refused before anything is done."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from paceline import Trainer, TrainingArguments
from paceline.pytorch.model.factory import check_trainable


class Quantized(nn.Linear):
    """A quantizer as transformers attaches it to a quantized model."""

    is_quantized = True

    def __init__(self, **quantizer: Any) -> None:
        super().__init__(2, 2)
        config = SimpleNamespace(quant_method=SimpleNamespace(value="fewer_bits"))
        self.hf_quantizer = SimpleNamespace(quantization_config=config, **{"is_trainable": True, **quantizer})


def test_quantised_weights_are_not_trained(tmp_path: Any) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), report_to="none")
    with pytest.raises(ValueError, match=r"Quantized is quantised \(fewer_bits\).*add an adapter"):
        Trainer(Quantized(), args, train_dataset=[{"input": 0}])
    with pytest.raises(ValueError, match="add an adapter"):
        Trainer(Quantized(), args).train()


def test_a_method_through_which_no_gradient_passes() -> None:
    model = Quantized(is_trainable=False)
    model.peft_config = {"default": object()}
    with pytest.raises(ValueError, match="fewer_bits, through which no gradient passes"):
        check_trainable(model)


@pytest.mark.parametrize("name", ["peft_config", "_hf_peft_config_loaded"])
def test_an_adapter_can_be_trained(name: str) -> None:
    model = Quantized()
    setattr(model, name, True)
    check_trainable(model)


def test_weights_that_are_trained_as_if_quantised() -> None:
    check_trainable(Quantized(is_qat_trainable=True))
