"""Training phases: what is trained and with which state, exact resume, every kind of end, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from small_models import Classifier, make_trainer
from torch import Tensor, nn
from torch.nn import functional

from paceline import EarlyStoppingCallback, Phase, Trainer, TrainerCallback, TrainingArguments, UnsupportedOption

WEIGHTS = ("first.weight", "first.bias", "second.weight", "second.bias")
HEAD = {"freeze": ["first.*"]}


def rows(number: int = 32, seed: int = 1) -> list[dict[str, Tensor]]:
    xs = torch.randn(number, 8, generator=torch.Generator().manual_seed(seed))
    return [{"x": x, "labels": x[:4].argmax()} for x in xs]


class Other:
    """A dataset of another length, as `package.module:name` names it."""

    def __init__(self) -> None:
        self.rows = rows(20, 2)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {"x": -torch.stack([each["x"] for each in samples]), "labels": torch.stack([s["labels"] for s in samples])}


def double(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs[1] if isinstance(outputs, tuple) else outputs
    return 2 * functional.cross_entropy(logits, labels)


class Watch(TrainerCallback):
    """Records gradients, optimizer states and events; stops after a step."""

    def __init__(self, stop: int | None = None) -> None:
        self.stop = stop
        self.gradients: list[list[str]] = []
        self.states: list[dict[str, dict[str, Tensor]]] = []
        self.lost: list[str] = []
        self.events: list[tuple[str, int]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(("begin", state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(("end", state.global_step))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.gradients.append([name for name, each in model.named_parameters() if each.grad is not None])

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        found = {name: optimizer.state.get(each) for name, each in model.named_parameters()}
        self.states.append({n: {k: v.clone() for k, v in s.items()} for n, s in found.items() if s})

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        self.lost.append(describe(optimizer, model))
        control.should_training_stop |= state.global_step == self.stop


def describe(optimizer: Any, model: nn.Module) -> str:
    """Returns the state of each parameter, to the bit."""
    named = {each: name for name, each in model.named_parameters()}
    return json.dumps(
        {named[p]: {k: v.double().sum().item() for k, v in s.items()} for p, s in optimizer.state.items()},
        sort_keys=True,
    )


def make(folder: Path, phases: Any, callbacks: Any = (), model: Any = None, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {"max_steps": 10, "num_train_epochs": 3, "learning_rate": 0.05, "weight_decay": 0.1}
    defaults |= {"save_strategy": "steps", "save_steps": 1}
    return make_trainer(
        folder,
        model or Classifier(dropout=0.1),
        rows(),
        eval_dataset=rows(12, 3),
        callbacks=list(callbacks),
        phases=phases,
        **{**defaults, **options},
    )


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def is_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def log_of(trainer: Trainer) -> list[Any]:
    return [row for row in trainer.state.log_history if "loss" in row or "eval_loss" in row]


def without_times(log: list[Any]) -> list[Any]:
    times = ("runtime", "per_second")
    return [{name: value for name, value in row.items() if not name.endswith(times)} for row in log]


# ---- what is trained


def test_a_phase_trains_and_remembers_what_it_should(tmp_path: Path) -> None:
    watch = Watch()
    model = Classifier()
    before = values(model)
    trainer = make(
        tmp_path, [Phase("head", until=4, **HEAD), Phase("all", until=7), Phase("body", freeze=["second.*"])],
        [watch], model, save_strategy="no",
    )  # fmt: skip
    trainer.train()
    heads, bodies = list(WEIGHTS[2:]), list(WEIGHTS[:2])
    assert watch.gradients == [heads] * 4 + [list(WEIGHTS)] * 3 + [bodies] * 3
    held = [list(state) for state in watch.states]
    # torch makes a state at the first step with a gradient; what is frozen loses it when the phase begins
    assert held == [[]] + [heads] * 4 + [list(WEIGHTS)] * 2 + [bodies] * 3
    for name in heads:  # the state of the head is that of before the change, and of one more step after it
        assert watch.states[4][name]["step"] == 4
        assert watch.states[5][name]["step"] == 5
    assert [row["phase"] for row in log_of(trainer)] == ["head"] * 4 + ["all"] * 3 + ["body"] * 3
    kept = sum(v.numel() for s in trainer.optimizer.state.values() for k, v in s.items() if k != "step")
    assert kept == 2 * (8 * 16 + 16)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not is_same(before, values(model))


def reference(model: Classifier, batches: list[list[dict[str, Tensor]]]) -> None:
    """Three steps of the head at 0.05, then three of everything at a linear schedule from 0.01."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    for step, batch in enumerate(batches):
        rate = 0.05 * (1 - step / 3) if step < 3 else 0.01 * (1 - (step - 3) / 3)
        for group in optimizer.param_groups:
            group["lr"] = rate
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(step >= 3 or name.startswith("second"))
        loss, _ = model(torch.stack([s["x"] for s in batch]), torch.stack([s["labels"] for s in batch]))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def test_the_numbers_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    model, plain = Classifier(), Classifier()
    phases = [Phase("head", until="3 steps", **HEAD), Phase("all", until="3 steps", learning_rate=0.01)]
    options = {"max_steps": -1, "train_sampling_strategy": "sequential", "save_strategy": "no"}
    trainer = make(tmp_path, phases, [], model, optim="adamw_torch", **options)
    trainer.create_optimizer()
    for group in trainer.optimizer.param_groups:  # one decay for all, as in the plain loop
        group["weight_decay"] = 0.1
    trainer.args.max_grad_norm = 1.0
    trainer.train()
    data = rows()
    order = [*range(3), *range(3)]  # the second phase starts a new epoch
    reference(plain, [data[4 * i : 4 * i + 4] for i in order])
    for name, value in values(model).items():
        torch.testing.assert_close(value, values(plain)[name], rtol=1e-5, atol=1e-6)


def test_rates_by_pattern_by_depth_and_by_phase(tmp_path: Path) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(8, 8)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(3))
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor, labels: Tensor) -> Any:
            x = self.embed(x)
            for block in self.blocks:
                x = block(x).relu()
            return {"loss": functional.cross_entropy(self.head(x), labels)}

    seen: list[dict[str, tuple[float, float]]] = []

    class Look(TrainerCallback):
        def on_step_begin(
            self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
        ) -> None:
            groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
            named = model.named_parameters()
            seen.append({n: (groups[id(p)]["lr"], groups[id(p)]["weight_decay"]) for n, p in named})

    phases = [
        Phase("depth", until=1, learning_rate=0.8, layer_decay=0.5),
        Phase("patterns", until=2, learning_rate={"head.*": 0.3, "blocks.*": 0.2}, weight_decay=0.7),
        Phase("plain"),
    ]
    options = {"max_steps": 3, "lr_scheduler_type": "constant", "save_strategy": "no"}
    trainer = make(tmp_path, phases, [Look()], Deep(), **options)
    trainer.train()
    depth, patterns, plain = seen
    assert [depth[f"{name}.weight"][0] for name in ("head", "blocks.2.0", "blocks.1.0", "blocks.0.0", "embed")] == [
        0.8, 0.8, 0.4, 0.2, 0.1,
    ]  # fmt: skip
    assert [patterns[name] for name in ("head.weight", "blocks.0.0.bias", "embed.weight")] == [
        (0.3, 0.7), (0.2, 0.0), (0.05, 0.7),
    ]  # fmt: skip
    assert set(plain.values()) == {(0.05, 0.1), (0.05, 0.0)}
    assert [row["learning_rate"] for row in log_of(trainer)] == [0.8, 0.3, 0.05]
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {0.05}


# ---- resuming

RICH = [
    Phase("head", until=3, **HEAD, warmup_steps=1, callbacks=[Watch]),
    Phase(
        "other",
        until="4 steps",
        learning_rate=0.01,
        lr_scheduler_type="cosine",
        train_dataset=Other(),
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        loss=double,
        data_collator=collate,
    ),
    Phase("rest", freeze=["*"], train=["first.weight", "second.bias"]),
]


@pytest.mark.slow
def test_a_run_resumes_from_every_step_to_the_bit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 2, "ema_decay": 0.5}
    whole = make(tmp_path / "whole", RICH, **options)
    whole.train()
    expected = values(whole.model)
    assert [row["phase"] for row in log_of(whole)] == ["head"] * 2 + ["other"] * 4 + ["rest"] * 4
    for step in range(1, 10):
        again = make(tmp_path / f"again-{step}", RICH, save_strategy="no", **options)
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert is_same(expected, values(again.model)), step
        assert without_times(log_of(again)) == without_times(log_of(whole)), step
    states = [json.loads((tmp_path / f"whole/checkpoint-{step}/trainer_state.json").read_text()) for step in (3, 4, 8)]
    assert [each["stateful_callbacks"]["PhaseProgress"]["attributes"]["name"] for each in states] == [
        "head", "other", "rest",
    ]  # fmt: skip


@pytest.mark.parametrize("step", [4, 8, 10])
def test_a_run_that_stops_with_epochs_resumes_to_the_bit(tmp_path: Path, step: int) -> None:
    phases = [Phase("head", until="1 epochs", **HEAD), Phase("all", until="0.5 epoch"), Phase("more", until="1 epoch")]
    options: dict[str, Any] = {"max_steps": -1, "eval_strategy": "epoch", "save_strategy": "epoch", "save_steps": 500}
    whole = make(tmp_path / "whole", phases, **options)
    whole.train()
    assert whole.state.global_step == 8 + 4 + 8
    make(tmp_path / "part", phases, [Watch(step)], **options).train()
    again = make(tmp_path / "part", phases, **options)
    again.train(resume_from_checkpoint=True)
    assert is_same(values(whole.model), values(again.model))
    losses = [[row for row in each.state.log_history if "loss" in row] for each in (whole, again)]
    assert losses[0] == losses[1]  # the end of the epoch in which a callback stops a run is evaluated too


def test_the_best_model_and_rotation(tmp_path: Path) -> None:
    phases = [Phase("head", until=5, **HEAD), Phase("all")]
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    trainer = make(tmp_path, phases, save_total_limit=1, **options)
    trainer.train()
    best = trainer.state.best_global_step
    assert {each.name for each in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{best}", "checkpoint-10"}
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric)


def test_epochs_keep_their_steps_on_fewer_processes(tmp_path: Path) -> None:
    phases = [Phase("head", until="1 epochs", **HEAD), Phase("all", until="2 epochs")]
    options = {"phases": phases, "num_train_epochs": 3, "save_strategy": "steps", "save_steps": 3}
    make_trainer(tmp_path, Classifier(), rows(), gradient_accumulation_steps=2, **options).train()
    checkpoint = tmp_path / "checkpoint-3"
    (checkpoint / "manifest.json").unlink()
    progress = json.loads((checkpoint / "progress.json").read_text())
    progress |= {"world_size": 2, "data_size": 2}  # as if two processes had written it, without accumulation
    progress["arguments"]["gradient_accumulation_steps"] = 1
    (checkpoint / "progress.json").write_text(json.dumps(progress))
    resumed = make_trainer(tmp_path, Classifier(), rows(), **options)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == resumed.state.max_steps == 12
    assert [row["phase"] for row in log_of(resumed)] == ["head"] * 4 + ["all"] * 8


def test_a_checkpoint_of_other_phases_is_refused(tmp_path: Path) -> None:
    make(tmp_path, [Phase("head", until=5, **HEAD), Phase("all")], [Watch(7)]).train()
    with pytest.raises(ValueError, match="written in phase 2, 'all'"):
        make(tmp_path, [Phase("head")]).train(resume_from_checkpoint=True)


def test_another_run_of_the_same_trainer(tmp_path: Path) -> None:
    phases = [Phase("head", until=2, **HEAD, loss=double), Phase("all", learning_rate=0.01)]
    trainer = make(tmp_path, phases, save_strategy="no", max_steps=4)
    trainer.train()
    assert trainer.compute_loss_func is None
    assert trainer.state.phase is None
    trainer.train()
    rates = [row["learning_rate"] for row in log_of(trainer)]
    assert rates == pytest.approx([0.05, 0.025, 0.01, 0.005])
    assert len([each for each in trainer.callback_handler.callbacks if type(each).__name__ == "PhaseProgress"]) == 0
    assert trainer.evaluate()["eval_loss"] > 0


# ---- ends, data, callbacks


class Metrics:
    """Metrics that a test decides."""

    def __init__(self, series: list[float]) -> None:
        self.series = iter(series)

    def __call__(self, prediction: Any) -> dict[str, float]:
        return {"score": next(self.series)}


@pytest.mark.parametrize(
    ("until", "series", "ends"),
    [
        ({"until": "eval_score >= 0.5"}, [0.1, 0.4, 0.5, 0.9], 3),
        ({"until": "score<0.2"}, [float("nan"), 0.15, 0.5], 2),
        ({"until": "plateau of eval_score", "patience": 2}, [0.1, 0.2, 0.2, 0.15, 0.9], 4),
        ({"until": "plateau of score", "patience": 1, "min_delta": 0.5}, [0.1, 0.7, 0.8], 3),
        ({"until": "eval_score > 2", "max_steps": 3}, [0.0], 3),
        ({"until": 0.4}, [0.0], 4),
        ({"until": "0.75 epochs"}, [0.0], 6),
    ],
)
def test_ends(tmp_path: Path, until: Any, series: list[float], ends: int) -> None:
    watch = Watch()
    trainer = make(
        tmp_path, [Phase("head", **until, **HEAD), Phase("all")], [watch], compute_metrics=Metrics(series + [0.0] * 20),
        eval_strategy="steps", eval_steps=1, save_strategy="no",
    )  # fmt: skip
    trainer.train()
    assert [len(names) for names in watch.gradients] == [2] * ends + [4] * (10 - ends)
    rates = [row["learning_rate"] for row in trainer.state.log_history if "loss" in row]
    assert rates[ends] == 0.05  # the schedule of the second phase is over its own steps
    assert rates[-1] == pytest.approx(0.05 / (10 - ends))


def test_a_plateau_follows_greater_is_better(tmp_path: Path) -> None:
    falls = [0.9, 0.8, 0.7, 0.6, 0.65, 0.7]  # as an error rate that improves four times
    trainer = make(
        tmp_path, [Phase("head", until="plateau of eval_score", patience=2, **HEAD), Phase("all")],
        compute_metrics=Metrics(falls + [0.0] * 20), eval_strategy="steps", eval_steps=1, save_strategy="no",
        metric_for_best_model="score", greater_is_better=False,
    )  # fmt: skip
    trainer.train()
    assert [row["phase"] for row in log_of(trainer) if "loss" in row] == ["head"] * 6 + ["all"] * 4


def test_a_metric_ends_the_run(tmp_path: Path) -> None:
    phases = [Phase("head", until=2, **HEAD), Phase("all", until="eval_score >= 0.5")]
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "no"}
    trainer = make(tmp_path, phases, compute_metrics=Metrics([0.9, 0.9, 0.1, 0.6]), **options)
    trainer.train()
    assert trainer.state.global_step == 4
    wrong = make(tmp_path, [Phase("head", until="eval_acuracy > 1"), Phase("all")], **options)
    with pytest.raises(ValueError, match="no metric 'eval_acuracy'"):
        wrong.train()


def test_early_stopping_still_stops(tmp_path: Path) -> None:
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "score"}
    stops = [EarlyStoppingCallback(1)]
    metrics = Metrics([0.5, 0.5, 0.5])
    phases = [Phase("head", until=2, **HEAD), Phase("all")]
    trainer = make(tmp_path, phases, stops, compute_metrics=metrics, load_best_model_at_end=True, **options)
    trainer.train()
    assert trainer.state.global_step == 2


def test_data_loss_and_callbacks_of_a_phase(tmp_path: Path) -> None:
    first, second = Watch(), Watch()
    phases = [Phase("one", until=2, callbacks=[first]), Phase("two", until=4, callbacks=[second], loss=double), RICH[1]]
    trainer = make(tmp_path, phases, save_strategy="no", max_steps=-1)
    trainer.train()
    assert first.events == [("begin", 0), ("end", 2)]
    assert second.events == [("begin", 2), ("end", 4)]
    assert (len(first.gradients), len(second.gradients)) == (2, 2)
    epochs = [row["epoch"] for row in log_of(trainer)]
    # 8 micro-batches of 4, of which 2 are drawn; then 7 of 3 samples (the last of 2), two for each step
    assert epochs == pytest.approx([1 / 8, 2 / 8, 1 + 1 / 8, 1 + 2 / 8, 2 + 2 / 7, 2 + 4 / 7, 2 + 6 / 7, 3])
    losses = [row["loss"] for row in log_of(trainer)]
    assert min(losses[2:4]) > 1.5 * max(losses[:2]) / 2


def test_the_display_names_the_phase(tmp_path: Path, capfd: Any) -> None:
    trainer = make(tmp_path, [Phase("head", until=5, **HEAD), Phase("all")], disable_tqdm=False, save_strategy="no")
    trainer.train()
    shown = capfd.readouterr()
    assert "phase head: steps 1 to 5, freezes first.*" in shown.out
    assert "all, " in shown.err


# ---- options


def test_phases_are_options_of_files(tmp_path: Path) -> None:
    text = json.dumps([{"name": "head", "until": 3, "freeze": ["first.*"]}, {"name": "o", "train_dataset": "m:Other"}])
    args = TrainingArguments(str(tmp_path), phases=text, max_steps=6)
    assert args.phases == [Phase("head", until=3, freeze=["first.*"]), Phase("o", train_dataset="m:Other")]
    again = TrainingArguments(**{**args.to_dict(), "output_dir": str(tmp_path)})
    assert again.phases == args.phases
    lost = TrainingArguments(str(tmp_path), phases=[Phase("one", loss=double)], max_steps=6).to_dict()
    assert lost["phases"] == [{"name": "one", "loss": f"<{__name__}.double>"}]
    with pytest.raises(ValueError, match="pass the object again"):
        TrainingArguments(str(tmp_path), phases=lost["phases"])


def test_objects_are_named_by_references(tmp_path: Path) -> None:
    phases = [{"name": "one", "until": 2}, {"name": "two", "train_dataset": f"{__name__}:Other", "callbacks": []}]
    trainer = make(tmp_path, phases, max_steps=4, save_strategy="no")
    trainer.train()
    assert log_of(trainer)[-1]["epoch"] == pytest.approx(1 + 2 / 5)
    wrong = make(tmp_path, [{"name": "one", "train_dataset": f"{__name__}:Nothing"}])
    with pytest.raises(ValueError, match=r"phases\['one'\].train_dataset.*Nothing"):
        wrong.train()


def refused() -> Iterator[tuple[Any, dict[str, Any], str]]:
    end = Phase("all")
    yield [Phase("one", until=5), Phase("two", until=5)], {}, "'two'.*not after the end of 'one'"
    yield [Phase("one"), end], {}, "has no until"
    yield [Phase("one", until=12), end], {}, "until=12 and max_steps=10"
    yield [Phase("one", until="12 steps"), end], {}, "steps 1 to 12"
    yield [Phase("one", until=5), Phase("one")], {}, "names one, one repeat"
    yield [Phase("one", until="eval_loss<1"), end], {"eval_strategy": "no"}, "needs evaluations"
    yield [Phase("one", until="loss<1"), Phase("x", until=5), end], {"eval_strategy": "epoch"}, "'500 steps'"
    yield [Phase("one", until=5, train_dataset=rows()), end], {"max_steps": -1}, "num_train_epochs"
    yield [Phase("one", until=5), Phase("two", until=8)], {"max_steps": -1, "num_train_epochs": 2}, "two lengths"
    yield [Phase("one", freeze=["*"])], {}, "freezes every parameter"
    yield [Phase("one", freeze=["frist.*"])], {}, "'frist.\\*' matches no parameter"
    yield [Phase("one", learning_rate={"none.*": 1.0})], {}, "'none.\\*' matches no parameter"
    yield [Phase("one", layer_decay=0.9)], {}, "no sequence of blocks"
    yield [end], {"auto_find_batch_size": True}, "auto_find_batch_size=True"
    yield [end], {"nonfinite_policy": "rollback"}, "rollback"
    yield [end], {"optimizer_in_backward": True}, "optimizer_in_backward"
    yield [end], {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}, "reduce_lr_on_plateau"
    yield [end], {"packing": "group", "phases": [Phase("one", train_dataset=rows())]}, "packing='group'"
    yield [end], {"optimizers": (None, "schedule")}, "schedule of your own"
    yield [end], {"deepspeed": {"zero_optimization": {"stage": 2}}}, "with deepspeed are .*: set parallel='fsdp'"
    yield [end], {"parallel": {"tp": 2}}, "with a mesh of parallel processes are .*: set parallel='ddp' or 'fsdp'"
    yield [{"name": "one", "freze": ["*"]}], {}, "did you mean 'freeze'"
    yield [{"until": 5}], {}, "needs a name"


SLOW = pytest.param(  # schedulefree is installed for the slow tests
    [{"name": "one"}], {"optim": "schedule_free_adamw"}, "two sets of weights", marks=pytest.mark.slow
)


@pytest.mark.parametrize(("phases", "options", "message"), [*refused(), SLOW])
def test_contradictions_are_refused_before_the_first_step(
    tmp_path: Path, phases: Any, options: Any, message: str
) -> None:
    if options.get("optimizers"):
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        options = {"optimizers": (optimizer, schedule), "model": model}
    watch = Watch()
    with pytest.raises(ValueError, match=message):
        make(tmp_path, options.pop("phases", phases), [watch], **options).train()
    assert not watch.gradients


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"until": 1.5}, "expected the number"),
    ({"until": 2.0}, "a fraction"),
    ({"until": 0}, "expected the number"),
    ({"until": "soon"}, "expected the number"),
    ({"until": True}, "expected the number"),
    ({"freeze": "a.*"}, "list of patterns"),
    ({"train": ["a"]}, "freeze"),
    ({"learning_rate": -1}, "at least 0"),
    ({"learning_rate": {}}, "at least 0"),
    ({"layer_decay": 0}, "factor"),
    ({"lr_scheduler_type": "lineal"}, "expected one of"),
    ({"lr_scheduler_type": "greedy"}, "follows evaluations"),
    ({"warmup_steps": "x"}, "at least 0"),
    ({"patience": 2}, "plateau"),
    ({"max_steps": 5}, "bounds a phase"),
    ({"gradient_accumulation_steps": 0}, "whole"),
    ({"callbacks": Watch()}, "list of callbacks"),
    ({"callbacks": [lambda args, state, control: None]}, "expected a callback"),
    ({"callbacks": [3]}, "expected a callback"),
    ({"greater_is_better": False}, "plateau"),
    ({"until": "plateau of eval_f1", "greater_is_better": "no"}, "True or False"),
    ({"loss": 3}, "expected a function"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_wrong_settings_name_phase_and_setting(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Phase("one", **settings)
    assert "phases['one']." in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"powers": 2}},
        {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": "many"}},
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 5.0}},
    ],
)
def test_a_wrong_schedule_of_a_later_phase_fails_before_the_first_step(tmp_path: Path, settings: Any) -> None:
    watch = Watch()
    with pytest.raises(ValueError, match=r"phases\['two'\]: the schedule"):
        make(tmp_path, [Phase("one", until=2), Phase("two", **settings)], [watch]).train()
    assert not watch.gradients


def later() -> Any:
    return 3


def test_what_a_text_names_as_a_callback_is_checked_before_the_first_step(tmp_path: Path) -> None:
    watch = Watch()
    phases = [{"name": "one", "until": 2}, {"name": "two", "callbacks": [f"{__name__}:later"]}]
    with pytest.raises(ValueError, match=r"phases\['two'\].callbacks=.*expected a callback"):
        make(tmp_path, phases, [watch]).train()
    assert not watch.gradients


@pytest.mark.parametrize(("rises", "steps"), [(False, 6), (True, 4)])
def test_the_direction_of_a_plateau(tmp_path: Path, rises: bool, steps: int) -> None:
    values = iter([0.5, 0.4, 0.4, 0.4, 0.4, 0.4])
    phases = [Phase("one", until="plateau of wer", patience=1, greater_is_better=rises)]
    trainer = make(
        tmp_path, phases, eval_strategy="steps", eval_steps=2, compute_metrics=lambda prediction: {"wer": next(values)}
    )
    trainer.train()
    assert trainer.state.global_step == steps


def test_a_plateau_of_an_error_rate_needs_a_direction(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="smaller values are better: set greater_is_better"):
        make(tmp_path, [Phase("one", until="plateau of eval_wer")], eval_strategy="steps", eval_steps=2)


def test_the_notes_say_when_a_phase_begins_and_which_way_its_metric_goes(tmp_path: Path, capsys: Any) -> None:
    phases = [Phase("one", until="plateau of eval_loss", max_steps=4), Phase("two", until="3 steps"), Phase("three")]
    make(tmp_path, phases, eval_strategy="steps", eval_steps=2, disable_tqdm=False).train()
    shown = capsys.readouterr().out
    assert "phase one: steps 1 to 4 at the latest (until plateau of eval_loss, minimized)" in shown
    assert "phase two: from the end of the phase before to 7 at the latest" in shown
    assert "phase three: from the end of the phase before to 10\n" in shown


def test_overridden_methods_that_would_not_listen_are_refused(tmp_path: Path) -> None:
    class OwnLoss(Trainer):
        def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
            return model(**inputs)[0]

    class OwnLoader(Trainer):
        def get_train_dataloader(self) -> Any:
            return super().get_train_dataloader()

    for kind, phase, name in ((OwnLoss, Phase("a", loss=double), "compute_loss"), (OwnLoader, RICH[1], "get_train_")):
        trainer = make_trainer(tmp_path, Classifier(), rows(), cls=kind, num_train_epochs=3, phases=[phase])
        with pytest.raises(UnsupportedOption, match=name):
            trainer.train()


@pytest.mark.parametrize("phase", [Phase("a", loss=double), RICH[1]])
def test_a_teacher_of_one_dataset_is_refused(tmp_path: Path, phase: Phase) -> None:
    trainer = make(tmp_path, [replace(phase, until=None)])
    trainer.teacher = Classifier(seed=1)
    with pytest.raises(UnsupportedOption, match="leave teacher out"):
        trainer.train()


@pytest.mark.slow
def test_replicas_and_shards(tmp_path: Path) -> None:
    processes.run("phases_job.py", 2, str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for way in ("ddp", "fsdp", "shards"):
        assert [len(names) for names in first[f"{way} gradients"]] == [8] * 3 + [25] * 3 + [21] * 3
        assert first[f"{way} states"] == [8] * 3 + [25] * 3 + [21] * 3
        assert torch.equal(first[f"{way} straight"], second[f"{way} straight"])
        assert first[f"{way} losses"] == pytest.approx(first["ddp losses"], rel=1e-5)
        for step in (3, 7):
            assert torch.equal(first[f"{way} straight"], first[f"{way} resumed at {step}"])


# ---- forecasts


def test_the_forecast_counts_the_steps_of_all_phases(tmp_path: Path) -> None:
    phases = [Phase("head", until="2 epochs", **HEAD), Phase("all", until="3 epochs")]
    trainer = make_trainer(tmp_path, Classifier(), rows(), phases=phases, num_train_epochs=3)
    forecast = trainer.plan()
    assert (forecast.plan.max_steps, forecast.samples) == (40, 160)
    assert forecast.memory is not None
    assert "phase all: steps 17 to 40" in str(forecast)
    trainer.train()
    assert trainer.state.global_step == 40
    with pytest.raises(UnsupportedOption, match="time of a step"):
        trainer.plan(time=True)


def test_a_forecast_of_phases_with_other_data_is_refused(tmp_path: Path) -> None:
    phases = [Phase("small", until=4, per_device_train_batch_size=2), Phase("all", until=8)]
    trainer = make_trainer(tmp_path, Classifier(), rows(), phases=phases, num_train_epochs=3)
    with pytest.raises(UnsupportedOption, match="'small'"):
        trainer.plan()
