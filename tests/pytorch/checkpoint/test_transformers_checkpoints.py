"""Both ways: what we save, transformers loads; what its Trainer saves, we load."""

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.checkpoint.folders import get_last_checkpoint, newest_valid, staged, verify
from paceline.pytorch.checkpoint.files import load_model, load_rng, load_state, save_model
from paceline.pytorch.distributed.random import restore_rng

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

LLAMA = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
GPT2 = {
    "vocab_size": 32,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
BERT = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
T5 = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tied": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "tied three times": ("T5ForConditionalGeneration", "T5Config", T5),
    "encoder": ("BertForSequenceClassification", "BertConfig", BERT),
    # Its experts are stored one by one and held as one tensor: names and shapes in the file are not the model's.
    "fused experts": ("MixtralForCausalLM", "MixtralConfig", {**LLAMA, "num_local_experts": 4}),
}


def build(kind: str, seed: int) -> Any:
    model_name, config_name, sizes = MODELS[kind]
    torch.manual_seed(seed)
    return getattr(transformers, model_name)(getattr(transformers, config_name)(**sizes))


def assert_equal(first: torch.nn.Module, second: torch.nn.Module) -> None:
    ours, theirs = first.state_dict(), second.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("max_shard_bytes", [None, 4000])
def test_ours_loads_on_either_side(tmp_path: Path, kind: str, max_shard_bytes: int | None) -> None:
    model = build(kind, 0)
    with staged(tmp_path / "checkpoint-1") as folder:
        save_model(model, folder, max_shard_bytes=max_shard_bytes)
    assert (tmp_path / "checkpoint-1" / "model.safetensors").exists() == (max_shard_bytes is None)
    assert verify(tmp_path / "checkpoint-1") == []
    assert_equal(model, type(model).from_pretrained(tmp_path / "checkpoint-1"))
    other = build(kind, 1)
    config = copy.deepcopy(other.config.to_dict())
    rng_state = torch.get_rng_state()
    assert load_model(other, tmp_path / "checkpoint-1") == []
    assert_equal(model, other)
    assert torch.equal(rng_state, torch.get_rng_state())
    assert other.config.to_dict() == config


def test_a_given_state_is_what_is_stored(tmp_path: Path) -> None:
    model = build("tied", 0)
    zeros = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    save_model(model, tmp_path, state_dict=zeros)
    load_model(model, tmp_path)
    assert not any(value.any() for value in model.state_dict().values())


def test_a_subclass_with_its_own_constructor_loads_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Own(transformers.BertForSequenceClassification):  # type: ignore[misc, name-defined]
        def __init__(self, config: Any, width: int) -> None:
            super().__init__(config)
            self.more = torch.nn.Linear(width, width)

    save_model(build("encoder", 0), tmp_path)
    model = Own(transformers.BertConfig(**BERT), 3)
    notes = load_model(model, tmp_path)
    assert len(notes) == 1
    assert "keep their values: more.weight, more.bias" in notes[0]
    assert "loaded by name" in caplog.text
    assert torch.equal(model.classifier.weight, build("encoder", 0).classifier.weight)


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.arange(8).add(index).remainder(32)
        return {"input_ids": row, "labels": row}


@pytest.mark.filterwarnings("ignore")
def test_theirs_loads_here(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = build("tied", 0)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, save_steps=3, per_device_train_batch_size=4, report_to="none", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=Rows())
    trainer.train()
    newest = get_last_checkpoint(tmp_path)
    assert newest is not None
    checkpoint = Path(newest)
    reports: list[str] = []
    assert newest_valid(tmp_path, reports.append) == checkpoint
    assert reports == []

    other = build("tied", 1)
    assert load_model(other, checkpoint) == []
    assert_equal(model, other)
    optimizer = torch.optim.AdamW(_groups_like(trainer, other))
    load_state(optimizer, checkpoint / "optimizer.pt")
    theirs = trainer.optimizer.state_dict()["state"]
    assert theirs.keys() == optimizer.state_dict()["state"].keys()
    for key, state in optimizer.state_dict()["state"].items():
        assert torch.equal(state["exp_avg"], theirs[key]["exp_avg"])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    load_state(scheduler, checkpoint / "scheduler.pt")
    assert scheduler.last_epoch == 3
    state = load_rng(checkpoint)
    assert state is not None
    restore_rng(state)
    saved = torch.load(Path(checkpoint, "rng_state.pth"), weights_only=False)
    assert random.getstate() == saved["python"]
    assert np.array_equal(np.random.get_state(legacy=True)[1], saved["numpy"][1])  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), saved["cpu"])


def _groups_like(trainer: Any, model: torch.nn.Module) -> list[dict[str, Any]]:
    """The parameter groups of their optimizer, with the parameters of `model`."""
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    own = dict(model.named_parameters())
    return [
        {"params": [own[names[parameter]] for parameter in group["params"]]} for group in trainer.optimizer.param_groups
    ]
