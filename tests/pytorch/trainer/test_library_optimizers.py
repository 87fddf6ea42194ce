"""Optimizers of other packages, the packages as released: they learn, they resume bit for bit, they are set up as in
transformers."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import slow_but
from small_models import losses, make_trainer, weights
from torch import Tensor, nn
from torch.nn import functional

import paceline
from paceline import TrainerCallback, TrainingArguments
from paceline.core.optional import is_installed
from paceline.pytorch.checkpoint.tensors import CheckpointError, load_tensors
from paceline.pytorch.optim.layerwise import LayerwiseOptimizer
from paceline.pytorch.optim.optimizers import OPTIMIZERS, resolve_optimizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU"),
    pytest.mark.filterwarnings("ignore:OptimState.* does not implement _stable_hash_for_caching"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),  # inside torch.compile
    pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.autocast"),  # galore-torch and grokadamw, when imported
]

MODULES = {
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "galore-torch": "galore_torch",
    "apollo-torch": "apollo_torch",
    "lomo-optim": "lomo_optim",
    "grokadamw": "grokadamw",
    "schedulefree": "schedulefree",
    "torch-optimi": "optimi",
}
ON_CPU = [name for name, entry in OPTIMIZERS.items() if entry.package in MODULES and not entry.devices]
IN_TRANSFORMERS = [name for name, entry in OPTIMIZERS.items() if entry.package in MODULES]
LAYERWISE = [name for name in ON_CPU if name.endswith("layerwise")]
# an option of each of these that transformers leaves at a default with a warning, or gets wrong
OWN_SETTINGS = {"no_deprecation_warning", "triton"}


def needs(name: str) -> None:
    package = OPTIMIZERS[name].package
    if not is_installed(MODULES[package]):
        pytest.skip(f"needs the optimizers extra: {package}")
    if name.startswith("galore"):
        needs("adamw_8bit")


class Words(nn.Module):
    """Two words in, one of four classes out. The weights are large enough for 8-bit states."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 64)
        self.first = nn.Linear(128, 64)
        self.norm = nn.LayerNorm(64)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(64, 4)

    def forward(self, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.drop(torch.tanh(self.norm(self.first(self.embedding(words).flatten(1))))))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def samples(number: int = 24) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, 64, (number, 2), generator=generator)
    return [{"words": pair, "labels": pair.sum() % 4} for pair in words]


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def options_for(name: str) -> dict[str, Any]:
    options: dict[str, Any] = {"optim": name, "learning_rate": 3e-3}
    if OPTIMIZERS[name].targets:
        options.update(optim_target_modules=["first"], optim_args="rank=4,update_proj_gap=2")
    if name in ("lomo", "schedule_free_sgd"):
        options["learning_rate"] = 0.3
    if name == "adalomo":
        options["learning_rate"] = 0.05
    if name.startswith("schedule_free"):
        options.update(lr_scheduler_type="constant", warmup_steps=2)
    if name.endswith("layerwise") or "lomo" in name:
        options["max_grad_norm"] = 0
    return options


def go(folder: Path, *, stop: int | None = None, resume: bool = False, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 3,
        "callbacks": [StopAt(stop)] if stop else None,
        "optim_target_modules": None,
    }
    trainer = make_trainer(folder, options.pop("model", None) or Words(), samples(), **{**defaults, **options})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def loss_of(model: nn.Module) -> float:
    data = samples()
    model.eval()
    with torch.no_grad():
        batch = {key: torch.stack([sample[key] for sample in data]) for key in data[0]}
        return float(model(**batch)["loss"])


def check(folder: Path, **options: Any) -> Any:
    whole = go(folder / "whole", **{**options, "save_strategy": "no"})
    go(folder / "parts", stop=3, **options)
    parts = go(folder / "parts", resume=True, **options)
    assert whole.state.global_step == parts.state.global_step == 6
    assert torch.equal(weights(whole.model), weights(parts.model))
    assert losses(whole) == losses(parts)
    assert loss_of(whole.model) < loss_of(Words())
    return whole, parts


@pytest.mark.parametrize("name", slow_but(ON_CPU[::2], ON_CPU, pytest.mark.nightly))
def test_it_learns_and_resumes_bit_for_bit(tmp_path: Path, name: str) -> None:
    needs(name)
    check(tmp_path, **options_for(name))
    saved = load_tensors(tmp_path / "parts" / "checkpoint-3" / "optimizer.pt")
    assert saved["param_groups"]


@pytest.mark.parametrize("name", ["adamw_8bit", "galore_adamw", "galore_adamw_layerwise", "apollo_adamw", "grokadamw"])
def test_states_of_16_bit_weights_resume(tmp_path: Path, name: str) -> None:
    needs(name)
    options = options_for(name)
    whole = go(tmp_path / "whole", model=Words().bfloat16(), **{**options, "save_strategy": "no"})
    go(tmp_path / "parts", stop=3, model=Words().bfloat16(), **options)
    parts = go(tmp_path / "parts", resume=True, model=Words().bfloat16(), **options)
    assert torch.equal(weights(whole.model), weights(parts.model))


@pytest.mark.parametrize("name", ["galore_adamw", "apollo_adamw", "adamw_8bit", "grokadamw", "lion_32bit"])
def test_weight_decay_is_honoured(tmp_path: Path, name: str) -> None:
    needs(name)
    trainer = go(tmp_path, weight_decay=0.5, **{**options_for(name), "max_steps": 1})
    decays = {
        parameter: group["weight_decay"] for group in trainer.optimizer.param_groups for parameter in group["params"]
    }
    names = dict(trainer.model.named_parameters())
    assert {name for name, parameter in names.items() if decays[parameter] == 0.5} == {
        "embedding.weight",
        "first.weight",
        "head.weight",
    }


@pytest.mark.parametrize("name", ["schedule_free_adamw", "schedule_free_sgd", "schedule_free_radam"])
def test_saving_and_evaluating_change_nothing(tmp_path: Path, name: str) -> None:
    """Both sets of weights survive: what is saved are the averaged ones, what goes on are the others, to the bit."""
    needs(name)
    options = options_for(name)
    alone = go(tmp_path / "alone", **{**options, "save_strategy": "no"})
    options.update(save_steps=1, eval_strategy="steps", eval_steps=1, eval_dataset=samples(8))
    watched = go(tmp_path / "watched", **options)
    assert torch.equal(weights(alone.model), weights(watched.model))
    assert losses(alone) == losses(watched)


@pytest.mark.parametrize("name", LAYERWISE)
def test_layerwise_is_the_same_update(tmp_path: Path, name: str) -> None:
    needs(name)
    options = options_for(name)
    layerwise = go(tmp_path / "layerwise", **options)
    assert isinstance(layerwise.optimizer, LayerwiseOptimizer)
    if name.startswith("apollo"):
        return  # each projection is drawn by its place in the optimizer: one of many, or alone
    together = go(tmp_path / "together", **{**options, "optim": name.removesuffix("_layerwise")})
    assert torch.allclose(weights(layerwise.model), weights(together.model), atol=1e-6)


def test_embeddings_are_in_32_bits(tmp_path: Path) -> None:
    needs("adamw_8bit")
    trainer = go(tmp_path, **options_for("adamw_8bit"))
    state = trainer.optimizer.state
    assert state[trainer.model.embedding.weight]["state1"].dtype == torch.float32
    assert state[trainer.model.first.weight]["state1"].dtype == torch.uint8


def test_embeddings_are_registered_with_bitsandbytes_itself() -> None:
    """In its manager, as with transformers; but for no longer than the optimizer lives, and for no other model."""
    needs("adamw_8bit")
    import bitsandbytes

    def make(model: nn.Module) -> Any:
        arguments = TrainingArguments(**options_for("adamw_8bit"), use_cpu=True)
        optimizer = paceline.Trainer(model, arguments).create_optimizer()
        assert isinstance(optimizer, bitsandbytes.optim.AdamW)
        return optimizer

    def width(optimizer: Any, weight: nn.Parameter) -> Any:
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        return optimizer.state[weight]["state1"].dtype

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.initialize()
    words = Words()
    first = make(words)
    assert manager.module_weight_config_triple == [(words.embedding, "weight", {"optim_bits": 32})]
    assert width(first, words.embedding.weight) == torch.float32
    plain = nn.Sequential(nn.Linear(64, 128))  # its weight has the place that the embedding has among the others
    second = make(plain)
    assert width(second, plain[0].weight) == torch.uint8
    manager.register_module_override(words.first, "weight", {"optim_bits": 32})  # a user's own
    third = make(words)
    assert width(third, words.first.weight) == torch.float32
    del first, second, third
    gc.collect()
    assert manager.module_weight_config_triple == [(words.first, "weight", {"optim_bits": 32})]
    manager.initialize()


def test_galore_8bit_where_there_is_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """galore-torch waits for CUDA after each parameter: all that a CPU lacks to run it."""
    needs("galore_adamw_8bit")
    with pytest.raises(ValueError, match="runs on cuda only"):
        go(tmp_path / "refused", **options_for("galore_adamw_8bit"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name in ("galore_adamw_8bit", "galore_adamw_8bit_layerwise"):
        monkeypatch.setattr("paceline.pytorch.optim.optimizers._check_device", lambda *given: None)
        check(tmp_path / name, **options_for(name))


def test_lomo_clips_with_a_second_backward_pass(tmp_path: Path) -> None:
    needs("lomo")
    options = {**options_for("lomo"), "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_steps": 1}
    trainer = go(tmp_path, optim_args="clip_grad_norm=0.01", **options)
    moved = torch.linalg.vector_norm(weights(trainer.model) - weights(Words()))
    assert float(moved) == pytest.approx(0.01, rel=1e-2)


def test_lomo_leaves_other_backward_passes_alone(tmp_path: Path) -> None:
    needs("adalomo")
    trainer = go(tmp_path, **options_for("adalomo"))
    before = weights(trainer.model)
    batch = {key: value[None] for key, value in samples()[0].items()}
    trainer.model(**batch)["loss"].backward()
    assert trainer.model.first.weight.grad is not None
    assert torch.equal(before, weights(trainer.model))


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
@pytest.mark.filterwarnings("ignore:This implementation of AdamW is deprecated")  # theirs
def test_class_and_settings_are_those_of_transformers(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(name)
    import transformers

    options = options_for(name)
    shared: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, **options}
    theirs = transformers.TrainingArguments(**shared)
    model = Words()
    if name == "galore_adafactor_layerwise":
        with pytest.raises(ValueError, match="Cannot combine"):  # theirs contradicts itself
            transformers.Trainer.get_optimizer_cls_and_kwargs(theirs, model)
        return
    expected_class, expected = transformers.Trainer.get_optimizer_cls_and_kwargs(theirs, Words())
    ours = TrainingArguments(**shared)
    monkeypatch.setattr("paceline.pytorch.optim.optimizers._check_device", lambda *given: None)
    found_class, found = resolve_optimizer(ours, model)
    if name.endswith("layerwise"):
        assert found_class is LayerwiseOptimizer
        inner = next(iter(expected.pop("optimizer_dict").values()))
        assert found.pop("optimizer_class") is type(inner)
    else:
        assert found_class is expected_class
    for key in ("params", "model"):
        assert (key in expected) == (key in found)
        check_groups(expected.pop(key, None), found.pop(key, None))
    assert {key: value for key, value in found.items() if key not in OWN_SETTINGS} == expected


def fresh_accelerate() -> None:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()


# one of each package and kind. Not GrokAdamW: both steps are the class's own, and its autocast warns at each parameter.
# Not torchao: what is compared is the loop, and compiling twice takes half a minute
COMPARED = ["adamw_8bit", "ademamix", "paged_lion_32bit", "galore_adamw", "galore_adamw_layerwise", "apollo_adamw"]
COMPARED += ["lomo", "adalomo", "schedule_free_adamw", "schedule_free_sgd", "stable_adamw"]


@pytest.mark.filterwarnings("ignore")  # of transformers, accelerate and what they import
@pytest.mark.parametrize("name", COMPARED)
def test_a_run_logs_the_losses_of_transformers(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same six updates in both; lomo-optim's AdaLomo asks for CUDA, so that theirs is given ours."""
    needs(name)
    import transformers

    options = {**options_for(name), "logging_steps": 1, "per_device_train_batch_size": 4, "num_train_epochs": 1}
    shared = {"output_dir": str(tmp_path), "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, **options}
    if name == "adalomo":
        monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)

    def rows(library: Any, arguments: dict[str, Any]) -> list[tuple[float, float]]:
        model = Words()
        model.drop.p = 0.0
        trainer = library.Trainer(model, library.TrainingArguments(**arguments), train_dataset=samples())
        trainer.train()
        return [(row["loss"], row["learning_rate"]) for row in trainer.state.log_history if "loss" in row]

    fresh_accelerate()
    theirs = rows(transformers, {**shared, "report_to": "none"})
    fresh_accelerate()
    ours = rows(paceline, shared)
    assert [loss for loss, _ in ours] == pytest.approx([loss for loss, _ in theirs], rel=2e-3)
    if not name.endswith("layerwise"):  # theirs logs the rate of a stand-in
        assert [rate for _, rate in ours] == pytest.approx([rate for _, rate in theirs])


@pytest.mark.filterwarnings("ignore")  # of transformers, accelerate and what they import
@pytest.mark.parametrize("name", ["adamw_8bit", "schedule_free_adamw", "adamw_torch_8bit", "stable_adamw", "grokadamw"])
def test_a_checkpoint_of_transformers_is_gone_on_from(tmp_path: Path, name: str) -> None:
    needs(name)
    import transformers

    options = {**options_for(name), "logging_steps": 1, "per_device_train_batch_size": 4, "num_train_epochs": 1}
    options.update(output_dir=str(tmp_path), use_cpu=True, save_strategy="steps", save_steps=3, disable_tqdm=True)

    def trainer_of(library: Any, **more: Any) -> Any:
        model = Words()
        model.drop.p = 0.0
        return library.Trainer(model, library.TrainingArguments(**options, **more), train_dataset=samples())

    fresh_accelerate()
    theirs = trainer_of(transformers, report_to="none")
    theirs.train()
    expected = losses(theirs)[3:]
    fresh_accelerate()
    ours = trainer_of(paceline)
    ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert losses(ours)[-3:] == pytest.approx(expected, rel=1e-5)


def test_a_checkpoint_with_objects_is_refused(tmp_path: Path) -> None:
    """transformers pickles the projections of low-rank optimizers: nothing of a pickle is ever run."""
    needs("apollo_adamw")
    trainer = go(tmp_path, **options_for("apollo_adamw"))
    kind = type(trainer.optimizer).__mro__[2]
    torch.save(kind.state_dict(trainer.optimizer), tmp_path / "optimizer.pt")
    with pytest.raises(CheckpointError, match="holds more than tensors and plain values"):
        load_tensors(tmp_path / "optimizer.pt")


def check_groups(theirs: Any, ours: Any) -> None:
    if not isinstance(theirs, list):
        return
    assert len(theirs) == len(ours)
    for one, other in zip(theirs, ours, strict=True):
        assert [p.shape for p in one["params"]] == [p.shape for p in other["params"]]
        assert {k: v for k, v in one.items() if k != "params"} == {k: v for k, v in other.items() if k != "params"}
