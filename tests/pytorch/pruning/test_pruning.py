"""`Pruning`: exact counts, masks under every optimizer step, resume, best model, averages, and what is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from safetensors.torch import load_file
from small_models import Classifier
from torch import Tensor, nn
from torch.nn.utils import prune

from paceline import Phase, Pruning, Trainer, TrainerCallback, TrainingArguments, UnsupportedOption
from paceline.cli.main import main
from paceline.pytorch.pruning.callback import to_semi_structured
from paceline.pytorch.pruning.masks import Target, keep_most, two_of_four

STEPS = 8
WEIGHTS = ("first.weight", "second.weight")


def rows(number: int = 32) -> list[dict[str, Tensor]]:
    xs = torch.randn(number, 8, generator=torch.Generator().manual_seed(1))
    return [{"x": x, "labels": x[:4].argmax()} for x in xs]


class Watch(TrainerCallback):
    """Checks, where a step is complete, that what was pruned is +0.0 and stays pruned."""

    def __init__(self, pruning: Pruning, stop: int | None = None) -> None:
        self.pruning, self.stop = pruning, stop
        self.zeros: list[int] = []
        self.earlier: dict[str, Tensor] = {}
        self.rows: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.earlier = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.rows.append(logs)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        weights = dict(model.named_parameters())
        for name, mask in self.pruning.masks.items():
            pruned = weights[name].detach()[~mask]
            assert not pruned.view(torch.int32).any()
            assert not (mask & ~self.earlier.get(name, mask)).any()
        self.earlier = dict(self.pruning.masks)
        self.zeros.append(sum(int((~mask).sum()) for mask in self.pruning.masks.values()))
        control.should_training_stop |= state.global_step == self.stop


def make(
    folder: Path, callback: Pruning | None, model: nn.Module | None = None, stop: int | None = None, **options: Any
) -> Any:
    defaults: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.05,
        "save_steps": 2,
        "logging_steps": 1,
        "disable_tqdm": True,
        "report_to": "none",
        "use_cpu": True,
    }
    args = TrainingArguments(str(folder), **{**defaults, **options})
    callbacks = [callback, Watch(callback, stop)] if callback is not None else []
    return Trainer(
        model if model is not None else Classifier(dropout=0.1),
        args,
        train_dataset=rows(),
        eval_dataset=rows(8),
        callbacks=callbacks,
    )


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"weight_decay": 0.1},
    "momentum": {"optim": "sgd", "optim_args": "momentum=0.9", "weight_decay": 0.1},
    "adafactor": {"optim": "adafactor"},
    "in backward": {"optimizer_in_backward": True, "max_grad_norm": 0},
    "clipped, bf16, accumulated": {"max_grad_norm": 0.01, "bf16": True, "gradient_accumulation_steps": 2},
    "average": {"ema_decay": 0.9, "average_steps": 3},
    "mean": {"swa_start": 2, "average_steps": 1},
}
KINDS: dict[str, dict[str, Any]] = {
    "cubic": {"sparsity": 0.7, "start": 1, "end": 6, "every": 2},
    "linear by layer": {"sparsity": 0.5, "schedule": "linear", "scope": "layer"},
    "one shot": {"sparsity": 0.5, "schedule": "one_shot", "start": 3},
    "movement": {"sparsity": 0.6, "method": "movement", "start": 2, "end": 6},
    "channels": {"sparsity": 0.25, "unit": "channel", "exclude": ["second"]},
    "heads": {"sparsity": 0.5, "unit": "head", "heads": {"second": 4}},
    "2:4": {"unit": "2:4", "schedule": "one_shot", "start": 2},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masks_hold_with_every_optimizer_and_resume_bit_for_bit(tmp_path: Path, name: str) -> None:
    whole = make(tmp_path / "whole", Pruning(**KINDS["cubic"]), **OPTIMIZERS[name])
    whole.train()
    check_resume(tmp_path, KINDS["cubic"], OPTIMIZERS[name], values(whole.model))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "cubic"])
def test_every_kind_holds_and_resumes_bit_for_bit(tmp_path: Path, kind: str) -> None:
    whole = make(tmp_path / "whole", Pruning(**KINDS[kind]))
    whole.train()
    check_resume(tmp_path, KINDS[kind], {}, values(whole.model))


def check_resume(folder: Path, kind: dict[str, Any], options: dict[str, Any], expected: dict[str, Tensor]) -> None:
    make(folder / "parts", Pruning(**kind), stop=4, **options).train()
    pruning = Pruning(**kind)
    trainer = make(folder / "parts", pruning, Classifier(dropout=0.1, seed=3), **options)
    trainer.train(resume_from_checkpoint=True)
    found = values(trainer.model)
    assert_same(found, expected)
    assert pruning.masks
    saved = load_file(folder / "parts" / f"checkpoint-{STEPS}" / "model.safetensors")
    for name, mask in pruning.masks.items():
        assert not saved[name][~mask].any()  # permanent: the file is that of a plain model
        assert not found[name][~mask].any()
    assert saved.keys() == found.keys()


@pytest.mark.parametrize("share", [0.0, 0.003, 0.37, 0.5, 0.999])
def test_exactly_as_many_as_asked_for_are_pruned(share: float) -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        values = torch.randint(0, 4, (1 + seed * 13,), generator=generator).float()  # many equal ones
        kept = keep_most(values, share)
        assert int((~kept).sum()) == round(share * len(values))
        if kept.any() and not kept.all():
            assert values[kept].min() >= values[~kept].max()


def test_the_schedule_and_the_log(tmp_path: Path) -> None:
    pruning = Pruning(0.8, start=2, end=6)
    trainer = make(tmp_path, pruning)
    trainer.train()
    (watch,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, Watch))
    shares = [row["sparsity"] for row in watch.rows if "loss" in row]
    size = sum(dict(trainer.model.named_parameters())[name].numel() for name in WEIGHTS)
    expected = [0, 0, *(round(0.8 * (1 - (1 - n / 4) ** 3) * size) / size for n in (1, 2, 3, 4)), *[0.8] * 2]
    expected = [round(share * size) / size for share in expected]
    assert shares == pytest.approx(expected)
    assert {f"sparsity/{name}" for name in WEIGHTS} <= watch.rows[-1].keys()
    zeros = sum(int((dict(trainer.model.named_parameters())[name] == 0).sum()) for name in WEIGHTS)
    assert zeros == round(0.8 * size)


def test_structures_are_whole(tmp_path: Path) -> None:
    trainer = make(tmp_path / "channels", Pruning(**KINDS["channels"]))
    trainer.train()
    empty = ~trainer.model.first.weight.any(1)
    assert int(empty.sum()) == 4
    assert not trainer.model.first.bias[empty].any()
    trainer = make(tmp_path / "heads", Pruning(**KINDS["heads"]))
    trainer.train()
    assert int((~trainer.model.second.weight.reshape(4, 4, 4).transpose(0, 1).flatten(1).any(1)).sum()) == 2


def test_transposed_layers_of_transformers() -> None:
    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 6, generator=torch.Generator().manual_seed(0)))

    transposed = Target("a", Conv1D(), outputs=1, num_heads=2)
    plain = Target("b", nn.Linear(8, 6), outputs=0, num_heads=2)
    values = transposed.weight.detach()
    assert torch.equal(two_of_four(transposed, values), two_of_four(plain, values.T).T)
    assert (two_of_four(transposed, values).T.reshape(6, 2, 4).sum(-1) == 2).all()
    for unit, count in (("head", 2), ("channel", 6)):
        assert torch.equal(transposed.units(values, unit), plain.units(values.T, unit))
        kept = torch.arange(count) % 2 == 0
        assert torch.equal(transposed.spread(kept, unit), plain.spread(kept, unit).T)


def test_movement_scores_are_those_of_the_paper(tmp_path: Path) -> None:
    """With plain SGD, the score is the sum of weight * change of the weight / rate."""
    pruning = Pruning(0.5, method="movement", start=STEPS, schedule="one_shot")
    before: list[dict[str, Tensor]] = []

    class Keep(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            before.append(values(model))

        def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            after.append(values(model))

    after: list[dict[str, Tensor]] = []
    trainer = make(tmp_path, pruning, optim="sgd", lr_scheduler_type="constant", learning_rate=0.5)
    trainer.callback_handler.callbacks.insert(1, Keep())
    trainer.train()
    scores = pruning.state_dict()["scores"]
    for name in WEIGHTS:
        pairs = zip(before, after, strict=True)
        moved = sum((first[name] * (last[name] - first[name]) / 0.5 for first, last in pairs), torch.zeros(()))
        torch.testing.assert_close(scores[name], moved, rtol=1e-4, atol=1e-5)


def test_a_lottery_ticket_starts_a_new_run(tmp_path: Path) -> None:
    found = Pruning(0.5)
    make(tmp_path / "dense", found).train()
    ticket = Pruning(masks=found.masks)
    trainer = make(tmp_path / "ticket", ticket)
    trainer.train()
    for name, mask in found.masks.items():
        assert not dict(trainer.model.named_parameters())[name][~mask].any()
    with pytest.raises(ValueError, match=r"'other' has the shape \(2,\)"):
        make(tmp_path / "wrong", Pruning(masks={"other": torch.ones(2)})).train()


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_an_exported_model_is_pruned_without_masks(tmp_path: Path, form: str) -> None:
    pruning = Pruning(0.5)
    make(tmp_path / "run", pruning, checkpoint_format=form).train()
    assert main(["export", str(tmp_path / "run" / f"checkpoint-{STEPS}"), str(tmp_path / "out")]) == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() == Classifier().state_dict().keys()
    for name, mask in pruning.masks.items():
        assert not tensors[name][~mask].any()
        assert tensors[name][mask].any()


def test_a_ticket_begins_from_the_weights_of_a_step(tmp_path: Path) -> None:
    """Late rewinding: the weights of an early checkpoint, with the mask of the end."""
    found = Pruning(0.5, start=4, end=6)
    make(tmp_path / "dense", found, save_total_limit=None).train()
    model = Classifier(dropout=0.1)
    early = load_file(tmp_path / "dense" / "checkpoint-2" / "model.safetensors")
    model.load_state_dict(early)
    trainer = make(tmp_path / "ticket", Pruning(masks=found.masks), model, learning_rate=0.0)
    trainer.train()
    for name, mask in found.masks.items():
        weight = dict(trainer.model.named_parameters())[name]
        assert torch.equal(weight[mask], early[name][mask])
        assert not weight[~mask].any()


def test_the_best_model_and_a_second_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
    pruning = Pruning(0.5, end=2)
    trainer = make(tmp_path, pruning, **options)
    trainer.train()
    assert "before optimizer step 2" in caplog.text
    for name, mask in pruning.masks.items():
        assert not dict(trainer.model.named_parameters())[name][~mask].any()
    trainer.train()
    assert pruning.masks


def test_a_run_that_begins_to_prune_late_catches_up(tmp_path: Path) -> None:
    make(tmp_path, None, max_steps=STEPS, stop=None).train()
    pruning = Pruning(0.5, end=3)
    trainer = make(tmp_path, pruning)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert sum(int((~mask).sum()) for mask in pruning.masks.values()) == round(0.5 * (128 + 64))
    late = make(tmp_path / "late", Pruning(0.5, method="movement", end=3))
    with pytest.raises(UnsupportedOption, match="without movement scores"):
        late.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


@pytest.mark.parametrize("kind", ["cubic", "linear by layer", "movement", "channels"])
def test_what_is_pruned_stays_pruned_if_a_resumed_run_is_longer(tmp_path: Path, kind: str) -> None:
    """Its schedule has a lower sparsity at the step of the checkpoint."""
    whole = {**KINDS[kind], "start": 0.2, "end": 0.7}
    pruning, longer = Pruning(**whole), Pruning(**whole)
    make(tmp_path, pruning).train()
    trainer = make(tmp_path, longer, max_steps=3 * STEPS)
    trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS}"))
    (watch,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, Watch))
    assert set(watch.zeros) == {sum(int((~mask).sum()) for mask in pruning.masks.values())}
    assert_same(longer.masks, pruning.masks)


def test_parametrisations_of_torch_survive(tmp_path: Path) -> None:
    def model() -> nn.Module:
        made = Classifier(dropout=0.1)
        prune.l1_unstructured(made.first, "weight", amount=0.5)
        return made

    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    whole = make(tmp_path / "whole", None, model(), **options)
    whole.train()
    resumed = make(tmp_path / "whole", None, model(), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert_same(values(resumed.model), values(whole.model))
    assert int((resumed.model.first.weight == 0).sum()) == 64
    pruning = Pruning(0.5)  # prunes the other layer only
    both = make(tmp_path / "both", pruning, model())
    both.train()
    assert list(pruning.masks) == ["second.weight"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "sparsity"),
    ({"sparsity": 1.0}, "below 1"),
    ({"sparsity": 0.5, "method": "random"}, "magnitude, movement"),
    ({"sparsity": 0.5, "schedule": "cosine"}, "cubic"),
    ({"sparsity": 0.5, "every": 0}, "every"),
    ({"sparsity": 0.5, "modules": "first"}, "list of patterns"),
    ({"sparsity": 0.5, "unit": "head"}, "heads"),
    ({"sparsity": 0.5, "unit": "2:4"}, "one_shot"),
    ({"sparsity": 0.6, "unit": "2:4", "schedule": "one_shot"}, "one_shot"),
    ({"sparsity": 0.5, "masks": {}}, "masks are fixed"),
    ({"sparsity": 0.5, "method": "movement", "schedule": "one_shot"}, "steps before"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pruning(**arguments)


def refused() -> Iterator[tuple[dict[str, Any], dict[str, Any], str]]:
    yield {"sparsity": 0.5, "modules": ["nothing"]}, {}, "finds no"
    yield {"sparsity": 0.5, "start": 5, "end": 3}, {}, "start <= end"
    yield {"sparsity": 0.5, "end": 99}, {}, "start <= end"
    yield {"sparsity": 0.5, "unit": "head", "heads": {"first": 3}}, {}, "multiple of 3"
    in_backward = {"optimizer_in_backward": True, "max_grad_norm": 0}
    yield {"sparsity": 0.5, "method": "movement"}, in_backward, "optimizer_in_backward"


@pytest.mark.parametrize(("arguments", "options", "message"), list(refused()))
def test_what_cannot_be_pruned_is_refused(tmp_path: Path, arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path, Pruning(**arguments), **options).train()


def test_phases_that_freeze_weights_are_refused(tmp_path: Path) -> None:
    frozen = [Phase("head", until=2, freeze=["first.*"]), Phase("all")]
    with pytest.raises(UnsupportedOption, match="phases that freeze parameters, as the phase 'head' does"):
        make(tmp_path, Pruning(0.5), phases=frozen, max_steps=4).train()


def test_sparse_kernels_need_a_device_that_has_them() -> None:
    with pytest.raises(UnsupportedOption, match="compute capability"):
        to_semi_structured(Classifier(), [])


@pytest.mark.slow
def test_replicas_and_shards(tmp_path: Path) -> None:
    processes.run("pruning_job.py", 2, str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for way in ("ddp", "fsdp"):
        assert torch.equal(first[f"{way} straight"], first[f"{way} resumed"])
        assert torch.equal(first[f"{way} straight"], second[f"{way} straight"])
        assert int((first[f"{way} straight"] == 0).sum()) >= 6 * 256 // 2
    torch.testing.assert_close(first["ddp straight"], first["fsdp straight"], rtol=1e-4, atol=1e-5)


# ---- the option


def test_the_option_prunes_as_the_callback_does(tmp_path: Path) -> None:
    found = []
    for place, options in enumerate(({"pruning": {"sparsity": 0.5, "start": 1, "end": 6, "every": 2}}, {})):
        given = None if options else Pruning(0.5, start=1, end=6, every=2)
        trainer = make(tmp_path / str(place), given, **options)
        trainer.train()
        found.append(trainer.model.state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert not found[0]["first.weight"].all()


def test_the_option_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    assert TrainingArguments(str(tmp_path), pruning="0.25").pruning == {"sparsity": 0.25}
    assert TrainingArguments(str(tmp_path), pruning='{"unit": "2:4", "schedule": "one_shot"}').pruning["unit"] == "2:4"
    assert TrainingArguments(str(tmp_path)).pruning is None
    for value in (0, 1, 1.5, "much", True, {}, {"method": "movement"}, {"sparsity": 0.5, "modul": []}, [0.5]):
        with pytest.raises(ValueError, match="pruning="):
            TrainingArguments(str(tmp_path), pruning=value)
    with pytest.raises(ValueError, match=r"pruning=.*Pruning in callbacks"):
        make(tmp_path, Pruning(0.5), pruning=0.5)
    with pytest.raises(ValueError, match=r"Pruning\(method\)"):
        make(tmp_path, None, pruning={"sparsity": 0.5, "method": "size"})
