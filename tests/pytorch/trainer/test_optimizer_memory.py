"""`optimizer_in_backward` and `optimizer_state_dtype`: the numbers, the bytes, resume, shards, and what is refused."""

import re
from pathlib import Path
from typing import Any

import optimizer_memory_job as job
import processes
import pytest
import torch
from cases import slow_but
from optimizer_memory_job import Deep, StopAt, Watch, train, values
from small_models import losses
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline import Trainer, TrainerCallback, TrainingArguments, UnsupportedOption
from paceline.pytorch.optim.layerwise import LayerwiseOptimizer

OPTIMS = ("adamw_torch_fused", "adamw_torch", "sgd", "adagrad", "rmsprop", "nadam", "adafactor", "muon")


def state_bytes(trainer: Trainer) -> int:
    tensors = [value for entry in trainer.optimizer.state.values() for value in entry.values()]
    return sum(value.numel() * value.element_size() for value in tensors if isinstance(value, Tensor) and value.dim())


@pytest.mark.parametrize("optim", OPTIMS)
def test_a_step_inside_backward_is_the_same_step(tmp_path: Path, optim: str) -> None:
    plain = train(tmp_path / "plain", optim=optim)
    inside = train(tmp_path / "inside", optim=optim, optimizer_in_backward=True)
    assert isinstance(inside.optimizer, LayerwiseOptimizer)
    torch.testing.assert_close(values(inside), values(plain), rtol=1e-6, atol=1e-6)
    assert losses(inside) == pytest.approx(losses(plain), rel=1e-5)
    assert len(inside.optimizer.state) == len(plain.optimizer.state)
    rates = [[row["learning_rate"] for row in each.state.log_history if "loss" in row] for each in (plain, inside)]
    assert rates[0] == rates[1]
    decays = [[group["weight_decay"] for group in each.optimizer.param_groups] for each in (plain, inside)]
    assert decays[0] == decays[1] == [0.1, 0.0] if optim != "muon" else decays[0] == decays[1]


def test_gradients_are_never_all_held(tmp_path: Path) -> None:
    plain, inside = Watch(), Watch()
    model = Deep()
    train(tmp_path, callbacks=[plain])
    train(tmp_path, model, callbacks=[inside], optimizer_in_backward=True)
    sizes = [parameter.numel() * parameter.element_size() for parameter in model.parameters()]
    assert plain.peak == sum(sizes)
    assert inside.peak <= 2 * max(sizes)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("switch", [(True, True), (True, False), (False, True)], ids=str)
def test_a_checkpoint_resumes_with_the_option_on_and_off(tmp_path: Path, switch: tuple[bool, bool]) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    whole = train(tmp_path / "whole", **options)
    train(tmp_path / "parts", callbacks=[StopAt(8)], optimizer_in_backward=switch[0], **options)
    resumed = train(tmp_path / "parts", resume=True, optimizer_in_backward=switch[1], **options)
    assert resumed.state.global_step == whole.state.global_step == 16
    torch.testing.assert_close(values(resumed), values(whole), rtol=1e-6, atol=1e-6)


def test_a_group_without_parameters_is_kept(tmp_path: Path) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Embedding(job.WIDTH, job.WIDTH)

        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": nn.functional.cross_entropy(self.first(input_ids).flatten(0, 1), labels.flatten())}

    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    whole = train(tmp_path / "whole", Bare())
    train(tmp_path / "parts", Bare(), callbacks=[StopAt(8)], optimizer_in_backward=True, **options)
    assert torch.equal(values(train(tmp_path / "parts", Bare(), resume=True, **options)), values(whole))


def test_a_training_step_that_calls_backward_itself(tmp_path: Path) -> None:
    class Own(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            model.train()
            loss: Tensor = self.compute_loss(model, inputs)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

    plain = train(tmp_path / "plain", cls=Own)
    inside = train(tmp_path / "inside", cls=Own, optimizer_in_backward=True)
    assert torch.equal(values(inside), values(plain))


class Thaw(TrainerCallback):
    """Trains another layer from the third step on: one of the groups, but without a gradient so far."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.layers[0][0].weight.requires_grad_(state.global_step >= 2)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.layers[0][0].weight.requires_grad_(True)


def test_parameters_that_are_added_or_thawed_later(tmp_path: Path) -> None:
    class Grow(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
            if len(optimizer.param_groups) == 2:
                optimizer.add_param_group({"params": [late[-1].layers[1][0].weight], "lr": 0.01, "initial_lr": 0.01})

    late: list[Any] = []
    found = []
    for is_inside in (False, True):
        late.append(Deep())
        late[-1].layers[1][0].weight.requires_grad_(False)
        model = late[-1]

        class Make(Trainer):
            def create_optimizer(self, model: Any = None) -> Any:
                made = super().create_optimizer(model)
                late[-1].layers[1][0].weight.requires_grad_(True)
                return made

        trainer = train(
            tmp_path, model, cls=Make, callbacks=[Grow(), Thaw()], optimizer_in_backward=is_inside,
            lr_scheduler_type="constant", warmup_steps=0,
        )  # fmt: skip
        assert len(trainer.optimizer.param_groups) == 3
        found.append(values(trainer))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_shared_layer_under_activation_checkpointing(tmp_path: Path, is_reentrant: bool) -> None:
    """Reentrant checkpoints run a backward pass each, and a shared layer's gradient comes in parts."""

    class Shared(Deep):
        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            hidden = self.embedding(input_ids)
            for _ in range(3):
                hidden = hidden + checkpoint(self.layers[0], hidden, use_reentrant=is_reentrant)
            loss = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
            return {"loss": loss}

    if is_reentrant:
        with pytest.raises(RuntimeError, match=r"in several parts.*use_reentrant=False"):
            train(tmp_path, Shared(), optimizer_in_backward=True)
        return
    plain = train(tmp_path / "plain", Shared())
    inside = train(tmp_path / "inside", Shared(), optimizer_in_backward=True)
    torch.testing.assert_close(values(inside), values(plain), rtol=1e-6, atol=1e-6)


# ---- moments in bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("is_inside", [False, True])
def test_moments_in_half_the_bytes(tmp_path: Path, is_inside: bool) -> None:
    options: dict[str, Any] = {"num_train_epochs": 12, "optim": "adamw_torch"}
    plain = train(tmp_path / "plain", **options)
    short = train(tmp_path / "short", optimizer_state_dtype="bfloat16", optimizer_in_backward=is_inside, **options)
    assert state_bytes(short) * 2 == state_bytes(plain)
    assert losses(short)[-1] < 0.5 * losses(short)[0]
    assert losses(short) == pytest.approx(losses(plain), rel=0.05, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("is_inside", slow_but([False], [False, True]))
def test_short_moments_resume_to_the_bit(tmp_path: Path, is_inside: bool) -> None:
    options: dict[str, Any] = {
        "save_strategy": "steps", "save_steps": 4, "optimizer_state_dtype": "bfloat16",
        "optimizer_in_backward": is_inside,
    }  # fmt: skip
    whole = train(tmp_path / "whole", **options)
    train(tmp_path / "parts", callbacks=[StopAt(8)], **options)
    saved = torch.load(tmp_path / "parts" / "checkpoint-8" / "optimizer.pt", weights_only=True)
    assert saved["state"][0]["exp_avg_sq"].dtype == torch.bfloat16
    resumed = train(tmp_path / "parts", resume=True, **options)
    assert torch.equal(values(resumed), values(whole))
    plain = train(tmp_path / "off", **{**options, "optimizer_state_dtype": "float32"}, callbacks=[StopAt(8)])
    again = train(tmp_path / "off", resume=True, **options)
    assert state_bytes(again) * 2 == state_bytes(plain)
    back = train(tmp_path / "parts2", **options, callbacks=[StopAt(8)])
    assert state_bytes(back) * 2 == state_bytes(plain)
    off = {**options, "optimizer_state_dtype": "float32", "optimizer_in_backward": False}
    assert state_bytes(train(tmp_path / "parts2", resume=True, **off)) == state_bytes(plain)


def test_a_state_of_another_model_is_an_error(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "optimizer_in_backward": True}
    train(tmp_path, callbacks=[StopAt(8)], **options)
    path = tmp_path / "checkpoint-8" / "optimizer.pt"
    saved = torch.load(path, weights_only=True)
    saved["state"][0]["exp_avg"] = torch.zeros(3)
    torch.save(saved, path)
    (path.parent / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"does not fit this LayerwiseOptimizer: exp_avg of parameter 0"):
        train(tmp_path, resume=True, **options)


# ---- several processes


def found_by(folder: Path, part: str) -> list[dict[str, Any]]:
    processes.finish(processes.start("optimizer_memory_job.py", 2, str(folder), part))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.slow
def test_shards_and_replicas(tmp_path: Path) -> None:
    first, second = found_by(tmp_path, "numbers")
    torch.testing.assert_close(first["inside True"], first["inside False"], rtol=1e-6, atol=1e-6)
    assert first["peak True"] < first["peak False"] / 2
    assert torch.equal(first["replica"], second["replica"])
    assert torch.equal(first["moments"], second["moments"])


@pytest.mark.slow
def test_shards_resume_to_the_bit(tmp_path: Path) -> None:
    first, _ = found_by(tmp_path, "resume")
    for layout in ("full", "sharded"):
        assert torch.equal(first[f"parts {layout}"], first[f"whole {layout}"])
        assert first[f"dtypes {layout}"] == {"torch.bfloat16"}


@pytest.mark.slow
def test_optimizers_of_packages_train_and_resume_on_shards_or_are_refused(tmp_path: Path) -> None:
    first, _ = found_by(tmp_path, "packages")
    for name in job.ON_SHARDS:
        assert torch.equal(first[f"parts {name}"], first[f"whole {name}"]), name
        alone = values(train(tmp_path / name, optim=name, per_device_train_batch_size=8, **job.SIMPLE))
        torch.testing.assert_close(first[f"whole {name}"], alone, rtol=0, atol=1e-5)
    for name in job.WHOLE_ONLY:
        assert re.search(rf"optim='{name}'.*sharded.*set parallel='ddp'", first[name])


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2.*set gradient_accumulation_steps=1"),
        ({"fp16": True}, "fp16=True.*bf16=True"),
        ({"nonfinite_policy": "skip"}, "nonfinite_policy='skip'.*'raise'"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True.*per_device_train_batch_size"),
        ({"gradient_noise_scale": True}, "gradient_noise_scale=True"),
        ({"parallel": "ddp"}, "parallel='ddp'.*set parallel='fsdp'"),
        ({"parallel": "xla"}, "optimizer_in_backward=True is not supported with DeepSpeed and on XLA"),
    ],
)
def test_options_that_need_all_gradients(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedOption, match=words):
        TrainingArguments(str(tmp_path), optimizer_in_backward=True, **options)


def test_clipping_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_grad_norm=0.5.*set max_grad_norm=0"):
        train(tmp_path, optimizer_in_backward=True, max_grad_norm=0.5)


class Prodigious(torch.optim.SGD):
    """Keeps a number over all parameters in its groups."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.param_groups[0]["d"] = self.param_groups[0].get("d", 1.0) * 1.1
        return super().step(closure)


class Unknown(torch.optim.SGD):
    """Keeps a second set of weights."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["z"] = parameter.detach().clone()
        return super().step(closure)


SHORT = {"optimizer_state_dtype": "bfloat16"}
INSIDE = {"optimizer_in_backward": True}


@pytest.mark.parametrize(
    ("made", "options", "words"),
    [
        ((Prodigious, {"lr": 0.1}), INSIDE, "Prodigious changes the values of a group"),
        ((torch.optim.LBFGS, {"lr": 0.1}), INSIDE, "LBFGS cannot step one parameter at a time.*closure"),
        ((Unknown, {"lr": 0.1}), SHORT, "state 'z' is not known as a moment"),
        ((torch.optim.SGD, {"lr": 0.1}), SHORT, "has no moments"),
    ],
)
def test_optimizers_that_cannot(tmp_path: Path, made: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        train(tmp_path, optimizer_cls_and_kwargs=made, **{"weight_decay": 0.0, **options})


@pytest.mark.parametrize("options", [INSIDE, SHORT], ids=["inside", "short"])
def test_an_optimizer_that_was_made_already(tmp_path: Path, options: dict[str, Any]) -> None:
    model = Deep()
    with pytest.raises(ValueError, match=r"has no effect on a AdamW.*optimizer_cls_and_kwargs"):
        train(tmp_path, model, optimizers=(torch.optim.AdamW(model.parameters()), None), **options)


def test_short_moments_of_short_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"requires float32 weights.*is bfloat16"):
        train(tmp_path, Deep().bfloat16(), **SHORT)
