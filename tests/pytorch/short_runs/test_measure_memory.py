"""`measure_memory`: the memory of a step by kind and module, without effects on the Trainer."""

from pathlib import Path

import pytest
import torch
from small_models import Classifier, Tagger, classification, losses, make_trainer, tagging, weights
from torch import Tensor, nn

from paceline import UnsupportedOption

MEBIBYTE = 2**20


class Wide(nn.Module):
    """A hidden layer whose output is a megabyte for each 16 samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16384)
        self.second = nn.Linear(16384, 2)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.second(torch.relu(self.first(x)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def wide_data(count: int) -> list[dict[str, Tensor]]:
    return [{"x": torch.randn(8), "labels": torch.tensor(index % 2)} for index in range(count)]


def test_sizes_are_those_of_the_tensors(tmp_path: Path) -> None:
    model = Wide()
    parameters = sum(parameter.numel() * 4 for parameter in model.parameters())
    found = make_trainer(tmp_path, model, wide_data(64), per_device_train_batch_size=16).measure_memory()
    assert found.by_kind["parameters"] == parameters
    assert found.by_kind["optimizer"] == pytest.approx(2 * parameters, abs=64)
    assert found.peak == sum(found.by_kind.values())
    by_name = {module.name: module for module in found.modules}
    assert list(by_name) == ["", "first", "second"]
    assert by_name["first"].outputs == MEBIBYTE
    assert by_name["first"].parameters == 4 * (8 * 16384 + 16384)
    assert by_name[""].parameters == parameters
    # two outputs of the hidden layer are kept; its gradient comes on top in the backward pass
    assert by_name[""].forward_peak >= 3 * parameters + 2 * MEBIBYTE
    assert found.peak == max(module.backward_peak for module in found.modules)
    text = str(found)
    assert text.startswith(f"Peak of a step: {found.peak / MEBIBYTE:,.1f} MiB (parameters 0.7, ")
    assert "\n(the model)" in text
    assert len({len(line) for line in text.splitlines()[1:]}) == 1, "columns are aligned"


def test_larger_batches_take_more(tmp_path: Path) -> None:
    peaks = [
        make_trainer(tmp_path, Wide(), wide_data(128), per_device_train_batch_size=size).measure_memory().peak
        for size in (16, 32)
    ]
    assert 2 * MEBIBYTE <= peaks[1] - peaks[0] <= 5 * MEBIBYTE


def test_nothing_remains(tmp_path: Path) -> None:
    runs = []
    for measures in (False, True):
        trainer = make_trainer(tmp_path / str(measures), Tagger(), tagging(40), max_steps=4, logging_steps=1)
        if measures:
            trainer.measure_memory()
        trainer.train()
        runs.append((losses(trainer), weights(trainer.model)))
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])


def test_an_error_ends_the_tracking(tmp_path: Path) -> None:
    class Fails(Classifier):
        calls = 0

        def forward(self, *args: Tensor, **kwargs: Tensor) -> dict[str, Tensor]:
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("second step")
            return super().forward(*args, **kwargs)

    trainer = make_trainer(tmp_path, Fails(), classification(40))
    with pytest.raises(RuntimeError, match="second step"):
        trainer.measure_memory()
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gives no batch"):
        make_trainer(tmp_path, Classifier(), []).measure_memory()
    compiled = make_trainer(tmp_path, Classifier(), classification(40), torch_compile=True)
    with pytest.raises(UnsupportedOption, match="torch_compile=True"):
        compiled.measure_memory()
    lazy = make_trainer(tmp_path, Classifier(), classification(40), linear_cross_entropy="second")
    with pytest.raises(UnsupportedOption, match="linear_cross_entropy='second'"):
        lazy.measure_memory()
