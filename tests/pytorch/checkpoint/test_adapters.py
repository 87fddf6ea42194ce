import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from paceline.pytorch.checkpoint.files import load_model, save_model
from paceline.pytorch.checkpoint.tensors import CheckpointError

torch.set_num_threads(1)


class AdapterModel(nn.Module):
    """As PEFT behaves: only adapters are saved, `default` in the folder itself, the others in folders of their name."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.adapters = nn.ModuleDict({name: nn.Linear(4, 2) for name in names})
        self.peft_config: dict[str, Any] = dict.fromkeys(names)
        self.active_adapters = [names[0]]
        self.loaded: list[tuple[str, bool]] = []

    def save_pretrained(self, save_directory: str, **options: Any) -> None:
        for name, adapter in self.adapters.items():
            folder = save_directory if name == "default" else os.path.join(save_directory, name)
            os.makedirs(folder, exist_ok=True)
            given = options.get("state_dict")
            prefix = f"adapters.{name}."
            state = adapter.state_dict()
            if given is not None:
                state = {key.removeprefix(prefix): value for key, value in given.items() if key.startswith(prefix)}
            save_file(state, os.path.join(folder, "adapter_model.safetensors"))

    def load_adapter(self, folder: str, name: str, is_trainable: bool = False) -> None:
        self.loaded.append((name, is_trainable))
        self.adapters[name].load_state_dict(load_file(os.path.join(folder, "adapter_model.safetensors")))
        if not is_trainable:
            self.eval()


def adapters_of(model: AdapterModel) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in model.adapters.parameters()]


@pytest.mark.parametrize("names", [("default",), ("default", "other"), ("other",)])
def test_every_adapter_comes_back(tmp_path: Path, names: tuple[str, ...]) -> None:
    model, fresh = AdapterModel(*names), AdapterModel(*names)
    fresh.active_adapters = [names[-1]]
    save_model(model, tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    assert load_model(fresh, tmp_path) == []
    assert all(torch.equal(a, b) for a, b in zip(adapters_of(model), adapters_of(fresh), strict=True))
    assert fresh.loaded == [(name, True) for name in names]
    assert fresh.active_adapters == [names[-1]]
    assert fresh.training


def test_given_state_reaches_save_pretrained(tmp_path: Path) -> None:
    model = AdapterModel("default")
    save_model(
        model, tmp_path, state_dict={name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    )
    load_model(model, tmp_path)
    assert not any(value.any() for value in adapters_of(model))


def test_an_only_adapter_of_any_name_may_stand_in_the_folder_itself(tmp_path: Path) -> None:
    save_model(AdapterModel("default"), tmp_path)
    model = AdapterModel("mine")
    assert load_model(model, tmp_path) == []
    assert model.loaded == [("mine", True)]


def test_an_adapter_that_is_not_there_is_told(tmp_path: Path) -> None:
    save_model(AdapterModel("default"), tmp_path)
    notes = load_model(AdapterModel("default", "new"), tmp_path)
    assert len(notes) == 1
    assert "lacks the adapter 'new'" in notes[0]


def test_damage_and_misfits_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    save_file({"weight": torch.ones(3, 3)}, path)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors does not fit the adapter 'default'"):
        load_model(AdapterModel("default"), tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    model = AdapterModel("default")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors cannot be read"):
        load_model(model, tmp_path)
    assert model.loaded == []


def test_hostile_pickled_adapter_never_reaches_its_library(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save({"weight": Hostile()}, tmp_path / "adapter_model.bin")
    model = AdapterModel("default")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin"):
        load_model(model, tmp_path)
    assert model.loaded == []
    assert not (tmp_path / "executed").exists()


class TestRealLibrary:
    """With PEFT itself, where it is installed."""

    @staticmethod
    def base() -> Any:
        transformers = pytest.importorskip("transformers")
        sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))

    @staticmethod
    def scramble(model: nn.Module, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator))

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("kind", ["wrapped", "injected"])
    def test_round_trip(self, tmp_path: Path, kind: str) -> None:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)

        def build(seed: int) -> Any:
            model = self.base()
            if kind == "wrapped":
                model = peft.get_peft_model(model, config)
                model.add_adapter("other", config)
            else:
                model.add_adapter(config, "default")
            self.scramble(model, seed)
            return model

        model, other = build(1), build(2)
        trainable = [name for name, parameter in other.named_parameters() if parameter.requires_grad]
        save_model(model, tmp_path)
        assert load_model(other, tmp_path) == []
        for name, value in model.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name
        assert trainable == [name for name, parameter in other.named_parameters() if parameter.requires_grad]
