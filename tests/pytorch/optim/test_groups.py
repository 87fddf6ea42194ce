"""Weight-decay groups and Muon's matrices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.pytorch.optim.groups import decay_parameter_names, matches, parameter_groups


class ScaleNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.rms = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.scale = ScaleNorm()


class Language(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.token = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.layer_norm = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.token.weight


def names(model, parameters):
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return {known[id(parameter)] for parameter in parameters}


def test_biases_and_normalisation_layers_are_not_decayed():
    expected = {"token.weight", "head.weight"}
    expected |= {f"blocks.{i}.{layer}.weight" for i in range(2) for layer in ("up", "down")}
    assert set(decay_parameter_names(Language())) == expected


def test_batch_norm_by_any_name_is_not_decayed():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True))
    assert decay_parameter_names(net) == ["0.weight"]


def test_two_groups_of_the_trainable_parameters():
    model = Language()
    model.blocks[0].requires_grad_(False)
    decayed, rest = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    every = names(model, decayed["params"]) | names(model, rest["params"])
    assert every == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "blocks.1.up.bias" in names(model, rest["params"])
    assert not any(name.startswith("blocks.0") for name in every)


def test_tied_weights_appear_once():
    decayed, _ = parameter_groups(Language(tied=True), 0.1)
    assert len({id(parameter) for parameter in decayed["params"]}) == len(decayed["params"])


@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5", "bert"])
def test_decay_names_equal_the_reference(kind):
    transformers = pytest.importorskip("transformers")
    from transformers import Trainer

    small = {"vocab_size": 32, "pad_token_id": 0}
    configs = {
        "gpt2": lambda: transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, **small),
        "llama": lambda: transformers.LlamaConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, **small
        ),
        "t5": lambda: transformers.T5Config(d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2, **small),
        "bert": lambda: transformers.BertConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, **small
        ),
    }
    config = configs[kind]()
    model = (
        transformers.T5ForConditionalGeneration(config)
        if kind == "t5"
        else transformers.BertForSequenceClassification(config)
        if kind == "bert"
        else transformers.AutoModelForCausalLM.from_config(config)
    )
    assert set(decay_parameter_names(model)) == set(Trainer.get_decay_parameter_names(None, model))


@pytest.mark.parametrize("tied", [False, True])
def test_muon_gets_the_hidden_matrices_of_a_plain_model(tied):
    model = Language(tied)
    muon, decayed, rest = parameter_groups(model, 0.1, "muon")
    assert muon["use_muon"]
    assert names(model, muon["params"]) == {f"blocks.{i}.{layer}.weight" for i in range(2) for layer in ("up", "down")}
    assert names(model, decayed["params"]) == {"token.weight"} | (set() if tied else {"head.weight"})
    assert len(rest["params"]) == 1 + 2 * (2 + 1 + 1 + 1)


def test_muon_leaves_the_output_layer_that_a_model_names():
    class Named(Language):
        def get_output_embeddings(self):
            return self.blocks[1].down

    model = Named()
    muon = parameter_groups(model, 0.1, "muon")[0]
    assert "head.weight" in names(model, muon["params"])
    assert "blocks.1.down.weight" not in names(model, muon["params"])


def test_muon_without_a_head_keeps_the_last_block():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    assert names(model, parameter_groups(model, 0.0, "muon")[0]["params"]) == {"0.weight", "1.weight", "2.weight"}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("all-linear", {"blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"}),
        ("all_linear", {"blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"}),
        (["up"], {"blocks.0.up", "blocks.1.up"}),
        (["1.up", "head"], {"blocks.1.up", "head"}),
        (r".*\.down", {"blocks.0.down", "blocks.1.down"}),
    ],
)
def test_muon_takes_the_target_modules(targets, expected):
    model = Language()
    muon = parameter_groups(model, 0.1, "muon", targets)[0]
    assert names(model, muon["params"]) == {f"{name}.weight" for name in expected}


def test_matches_whole_parts_only():
    assert not matches("blocks.0.setup", ["up"])
    assert matches("up", ["up"])


def test_muon_without_matrices_says_what_to_do():
    with pytest.raises(ValueError, match="optim_target_modules"):
        parameter_groups(nn.Linear(3, 2), 0.0, "muon")
