"""fp8: what is converted, undone and refused. Torchao emulates the 8 bits here, as a run never does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier, make_trainer
from torch import nn

from paceline import UnsupportedOption
from paceline.core.optional import is_installed
from paceline.pytorch.model.fp8 import check_device, use_fp8

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.odd, self.down = nn.Linear(16, 32), nn.Linear(32, 7), nn.Linear(32, 16)
        self.head = nn.Linear(16, 32)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.down(torch.tanh(self.up(x))))
        return result


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("torchao"), reason="needs torchao")
def test_layers_are_converted_in_place_and_back() -> None:
    from torchao.float8 import Float8LinearConfig

    model, x = Model(), torch.randn(16, 16)
    plain, parameters = model(x), dict(model.named_parameters())
    layers = [model.up, model.down]
    note, undo = use_fp8(model, Float8LinearConfig(emulate=True))
    assert note == "2 of 4 linear layers compute in 8-bit floating point."
    assert [model.up, model.down] == layers
    assert all(type(layer).__name__ == "Float8Linear" for layer in layers)
    assert type(model.head) is type(model.odd) is nn.Linear
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    computed = model(x)
    assert not torch.equal(computed, plain)
    torch.testing.assert_close(computed, plain, rtol=0.2, atol=0.1)
    computed.sum().backward()
    assert model.up.weight.grad is not None
    undo()
    assert all(type(layer) is nn.Linear for layer in layers)
    assert torch.equal(model(x), plain)
    assert set(vars(model.up)) == set(vars(model.odd))


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("torchao"), reason="needs torchao")
def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(UnsupportedOption, match="none of the 2 linear layers of Classifier"):
        use_fp8(Classifier())


def test_a_device_without_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedOption, match=r"fp8=True .*not supported.*[Ll]eave"):
        make_trainer(tmp_path, Model(), fp8=True, bf16=True)
    with pytest.raises(UnsupportedOption, match="fp8=True is not supported on cpu"):
        check_device(torch.device("cpu"))

    class Ampere:
        name, major, minor = "A100", 8, 0

    found: list[Any] = [Ampere()]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found[0])
    with pytest.raises(UnsupportedOption, match=r"A100 \(compute capability 8.0\)"):
        check_device(torch.device("cuda"))
    Ampere.minor = 9
    if not torch.version.hip:
        check_device(torch.device("cuda"))
