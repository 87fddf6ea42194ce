"""The registry of optimizers: names, options, the automatic choice, and equality with the reference."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from paceline.args.choices import OptimizerNames
from paceline.core.optimizer_options import split_options, typed_options
from paceline.pytorch.optim import choose
from paceline.pytorch.optim.adafactor import Adafactor, AdafactorSchedule
from paceline.pytorch.optim.choose import choose_optimizer
from paceline.pytorch.optim.muon import MuonWithAdamW
from paceline.pytorch.optim.optimizers import (
    OPTIMIZERS,
    build_optimizer,
    create_optimizer,
    describe_choice,
    resolve_optimizer,
)

OWN = [name for name, entry in OPTIMIZERS.items() if entry.package == "torch"]


def make_args(**changes):
    defaults = {
        "optim": "adamw_torch_fused",
        "optim_args": None,
        "optim_target_modules": None,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "adam_beta1": 0.8,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-7,
    }
    return SimpleNamespace(**{**defaults, **changes})


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 1))
    return model.to(dtype)


def loss_after(model, optimizer, num_steps=15):
    inputs = torch.linspace(-1, 1, 32).reshape(8, 4).to(next(model.parameters()).dtype)
    for _ in range(num_steps):
        loss = (model(inputs) - inputs.sum(-1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("name", OWN)
def test_every_optimizer_learns(name):
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    args = make_args(optim=name, learning_rate=3e-3)
    model = make_model()
    optimizer = create_optimizer(args, model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert loss_after(model, optimizer) < loss_after(make_model(), optimizer, 1)
    grouped = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.1}


def test_every_name_of_the_arguments_is_known():
    names = {member.value for member in OptimizerNames}
    assert names == set(OPTIMIZERS) | {"auto"}


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor"])
def test_a_run_equals_the_reference(name, tmp_path):
    pytest.importorskip("transformers")
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        optim=name,
        learning_rate=1e-3,
        weight_decay=0.1,
        adam_beta1=0.8,
        adam_beta2=0.95,
        adam_epsilon=1e-7,
        use_cpu=True,
    )
    ours, theirs = make_model(), make_model()
    their_class, their_kwargs = Trainer.get_optimizer_cls_and_kwargs(arguments, theirs)
    our_class, our_kwargs = resolve_optimizer(arguments, ours)
    assert our_kwargs == their_kwargs
    assert our_class is their_class or our_class is Adafactor
    trainer = Trainer(theirs, arguments)
    expected = loss_after(theirs, trainer.create_optimizer())
    assert loss_after(ours, create_optimizer(arguments, ours)) == pytest.approx(expected, rel=1e-5)


def test_settings_of_the_arguments_arrive():
    cls, kwargs = resolve_optimizer(make_args(optim="adamw_torch_fused"))
    assert cls is torch.optim.AdamW
    assert kwargs == {"lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-7, "fused": True}
    assert resolve_optimizer(make_args(optim=OptimizerNames.SGD))[1] == {"lr": 1e-3}


def test_settings_that_do_not_arrive_are_told(caplog):
    plain = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
    resolve_optimizer(make_args(optim="radam"))
    resolve_optimizer(make_args(optim="sgd", **plain))
    assert not caplog.records
    resolve_optimizer(make_args(optim="sgd", **{**plain, "adam_beta1": 0.8}))
    assert [record.getMessage() for record in caplog.records] == [
        "adam_beta1=0.8 has no effect: optim='sgd' does not take it; leave it out."
    ]


def test_optim_args_reach_every_argument_in_its_type():
    text = "momentum=0.9, nesterov=True,dampening=0"
    assert resolve_optimizer(make_args(optim="sgd", optim_args=text))[1] == {
        "lr": 1e-3,
        "momentum": 0.9,
        "nesterov": True,
        "dampening": 0,
    }
    kwargs = resolve_optimizer(make_args(optim="adamw_torch", optim_args="betas=(0.9,0.99),amsgrad=yes,eps=1e-6"))[1]
    assert kwargs == {"lr": 1e-3, "betas": (0.9, 0.99), "amsgrad": True, "eps": 1e-6}
    kwargs = resolve_optimizer(make_args(optim="adafactor", optim_args="beta1=0.9,scale_parameter=true"))[1]
    assert kwargs == {"lr": 1e-3, "beta1": 0.9, "scale_parameter": True, "relative_step": False}
    assert typed_options({"momentum": 0.5}, torch.optim.SGD, "sgd") == {"momentum": 0.5}
    assert split_options(" a=1 ,, b=(1,2),c=[3, 4] ") == {"a": "1", "b": "(1,2)", "c": "[3, 4]"}


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("momentun=0.9", TypeError, "did you mean 'momentum'"),
        ("lr=0.1", TypeError, "learning_rate=0.1"),
        ("params=1", TypeError, "no option 'params'"),
        ("momentum", ValueError, "name=value"),
        ("momentum=fast", ValueError, "should be a number"),
        ("momentum=true", ValueError, "should be a number"),
        ("nesterov=1", ValueError, "true or false"),
        ("momentum=0.1,momentum=0.2", ValueError, "twice"),
    ],
)
def test_optim_args_that_do_not_fit(text, kind, words):
    with pytest.raises(kind, match=words):
        resolve_optimizer(make_args(optim="sgd", optim_args=text))


def test_tuples_of_the_wrong_length_are_refused():
    with pytest.raises(ValueError, match="2 values in brackets"):
        resolve_optimizer(make_args(optim_args="betas=(0.9,0.99,0.999)"))


def test_weight_decay_of_optim_args_reaches_the_group():
    optimizer = create_optimizer(make_args(optim="sgd", weight_decay=0.0, optim_args="weight_decay=0.3"), make_model())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    with pytest.raises(ValueError, match="leave one out"):
        create_optimizer(make_args(optim="sgd", optim_args="weight_decay=0.3"), make_model())


def test_unknown_names():
    with pytest.raises(ValueError, match="did you mean 'adamw_torch'"):
        resolve_optimizer(make_args(optim="adamw_toch"))


def test_nothing_to_train():
    with pytest.raises(ValueError, match="no trainable parameter"):
        create_optimizer(make_args(), make_model().requires_grad_(False))


def test_target_modules_are_for_muon():
    with pytest.raises(ValueError, match="optim_target_modules"):
        create_optimizer(make_args(optim_target_modules=["0"]), make_model())
    optimizer = create_optimizer(make_args(optim="muon", optim_target_modules=["0"]), make_model())
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 2, 5]


def test_a_class_and_kwargs_or_a_factory():
    model = make_model()
    optimizer = build_optimizer(torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}, model, weight_decay=0.2)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    one = [{"params": list(model.parameters())}]
    assert len(build_optimizer(torch.optim.SGD, {"lr": 0.5, "params": one}, model).param_groups) == 1

    class Factory:
        def __call__(self, opt_model, scale):
            return torch.optim.SGD(opt_model.parameters(), lr=scale)

    assert build_optimizer(Factory, {"scale": 0.25}, model).defaults["lr"] == 0.25
    own = create_optimizer(make_args(), model, cls_and_kwargs=(torch.optim.SGD, {"lr": 0.5}), decay_names={"4.weight"})
    assert [(len(group["params"]), group["weight_decay"]) for group in own.param_groups] == [(1, 0.1), (7, 0.0)]
    if hasattr(torch.optim, "Muon"):
        assert len(build_optimizer(MuonWithAdamW, {"lr": 0.1}, model).param_groups) == 3


def test_complex_weights_run_without_the_fused_kernel(caplog):
    model = nn.Module()
    model.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with caplog.at_level(logging.WARNING):
        optimizer = create_optimizer(make_args(), model)
    assert not optimizer.defaults["fused"]
    assert "phase is complex64" in caplog.text
    (model.phase - 1).abs().square().sum().backward()
    optimizer.step()


def test_auto_takes_fused_adamw_where_it_fits(monkeypatch, caplog):
    monkeypatch.setattr(choose, "free_memory", lambda device: 2**30)
    args, model = make_args(optim="auto"), make_model()
    with caplog.at_level(logging.INFO):
        optimizer = create_optimizer(args, model)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["fused"]
    assert "of 1 GiB free" in caplog.text
    assert describe_choice(args, model).startswith("optim='auto' took 'adamw_torch_fused': fused AdamW: float32 on cpu")
    assert describe_choice(make_args(optim="sgd"), model) == "optim='sgd', as asked"


def test_auto_takes_adafactor_where_memory_is_short(monkeypatch):
    monkeypatch.setattr(choose, "free_memory", lambda device: 1000)
    args, model = make_args(optim="auto"), make_model()
    assert isinstance(create_optimizer(args, model), Adafactor)
    assert "row and column means" in describe_choice(args, model)


def test_auto_says_what_it_does_not_know_and_what_16_bit_costs(monkeypatch):
    monkeypatch.setattr(choose, "free_memory", lambda device: None)
    choice = choose_optimizer(make_model(torch.bfloat16))
    assert choice.name == "adamw_torch_fused"
    assert "not known" in choice.reason
    assert "bf16=True" in choice.reason
    assert choose_optimizer(make_model().to("meta")).name == "adamw_torch"
    with pytest.raises(ValueError, match="pass the model"):
        resolve_optimizer(make_args(optim="auto"))


def test_free_memory_of_the_host_is_a_number_or_unknown():
    free = choose.free_memory(torch.device("cpu"))
    assert free is None or free > 0
    assert choose.free_memory(torch.device("meta")) is None


def test_adafactor_with_rates_of_its_own_is_refused_with_a_remedy_that_runs():
    args = make_args(optim="adafactor", optim_args="relative_step=True,scale_parameter=True")
    with pytest.raises(ValueError, match=r"relative_step=True is not supported.*AdafactorSchedule\(optimizer\)"):
        resolve_optimizer(args)
    optimizer = Adafactor(make_model().parameters())
    AdafactorSchedule(optimizer).step()
