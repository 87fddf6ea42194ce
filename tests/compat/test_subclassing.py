"""Attributes that subclasses written for transformers read and set, and what they are told."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier, Tagger, classification, losses, make_trainer, tagging, weights
from torch import nn
from torch.nn import functional

from paceline import CallbackHandler, Trainer
from paceline.compat.private_names import UNCALLED


def test_what_no_backend_sets(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Classifier(), classification(8))
    for name in ("is_deepspeed_enabled", "is_fsdp_enabled", "is_fsdp_xla_enabled", "is_model_parallel", "is_in_train"):
        assert getattr(trainer, name) is False
    for name in ("deepspeed", "hub_model_id", "push_in_progress", "hp_name", "hp_search_backend", "label_smoother"):
        assert getattr(trainer, name) is None
    assert trainer.get_sp_size() == trainer.get_cp_size() == trainer.get_tp_size() == 1
    assert trainer._train_batch_size == trainer.args.train_batch_size
    assert torch.equal(trainer.gather_function(torch.ones(2)), torch.ones(2))
    trainer.gather_function = torch.neg  # as an evaluation loop written anew sets it
    assert torch.equal(trainer.gather_function(torch.ones(2)), -torch.ones(2))
    assert trainer.args.deepspeed_plugin is trainer.args.hf_deepspeed_config is trainer.args.fsdp_plugin_args is None


def test_the_length_of_the_window(tmp_path: Path) -> None:
    class Own(Trainer):
        seen: list[int] = []

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if self.model.training:  # not while it is looked at what the loss is a mean over
                self.seen.append(self.current_gradient_accumulation_steps)
            return super().compute_loss(*args, **kwargs)

    trainer = make_trainer(tmp_path, Classifier(), classification(20), cls=Own, gradient_accumulation_steps=3)
    assert trainer.current_gradient_accumulation_steps == 3
    trainer.train()
    assert Own.seen == [3, 3, 3, 2, 2]  # the last window is short


def test_setting_it_divides_by_another_number(tmp_path: Path) -> None:
    """Trainers whose loss is already a sum over the optimizer step set it to 1."""

    class Own(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            share = self.current_gradient_accumulation_steps
            self.current_gradient_accumulation_steps = 1
            return loss / share if self.model.training else loss

    own = make_trainer(tmp_path, Classifier(), classification(24), cls=Own, gradient_accumulation_steps=2)
    plain = make_trainer(tmp_path, Classifier(), classification(24), gradient_accumulation_steps=2)
    # the first micro-batch of a window reads 2 and leaves 1 to the second, as in transformers
    factors = [0.5 * 2, 1.0 * 2]
    seen: list[float] = []
    original = Trainer.compute_loss

    class Expected(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if self.model.training:
                seen.append(factors[len(seen) % 2])
            return original(self, *args, **kwargs) * (seen[-1] if self.model.training else 1)

    expected = make_trainer(
        tmp_path, Classifier(), classification(24), cls=Expected, gradient_accumulation_steps=2, loss_weight="samples"
    )
    own.args.loss_weight = "samples"
    own.loss_normalizer.declare("samples")
    for trainer in (own, expected, plain):
        trainer.train()
    assert losses(own) == pytest.approx(losses(expected))
    assert losses(own) != pytest.approx(losses(plain))


class Quiet(nn.Module):
    """A tagger that shows no logits, so that nothing can be recomputed from them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Tagger()

    def forward(self, input_ids: Any, labels: Any, **kwargs: Any) -> Any:
        return self.inner.head(torch.tanh(self.inner.embedding(input_ids))).unsqueeze(0).sum(0, keepdim=True)


def sums(model: Any, inputs: Any) -> Any:
    logits = model(**inputs)[0]
    return functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), reduction="sum")


class Divides(Trainer):
    """Divides by the count it is given."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        assert num_items_in_batch is not None
        return sums(model, inputs) / torch.as_tensor(num_items_in_batch).clamp(min=1)


class Ignores(Trainer):
    """Takes the count and makes a mean of its own, as many a script does."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return sums(model, inputs) / (inputs["labels"] != -100).sum().clamp(min=1)


@pytest.mark.filterwarnings("ignore")
def test_a_loss_that_divides_by_the_count_is_used_as_it_is(tmp_path: Path) -> None:
    data = tagging(24)
    plain = make_trainer(tmp_path, Tagger(), data, gradient_accumulation_steps=3, loss_weight="tokens")
    plain.train()
    for cls in (Divides, Ignores):
        trainer = make_trainer(tmp_path, Quiet(), data, cls=cls, gradient_accumulation_steps=3)
        trainer.model_accepts_loss_kwargs = True
        trainer.train()
        assert losses(trainer) == pytest.approx(losses(plain), rel=1e-5), cls
        torch.testing.assert_close(weights(trainer.model), weights(plain.model))


@pytest.mark.parametrize("accepts", [False, True])
def test_whether_the_count_is_passed_on_can_be_set(tmp_path: Path, accepts: bool) -> None:
    class Model(Tagger):
        seen: list[Any] = []

        def forward(self, input_ids: Any, labels: Any, **kwargs: Any) -> Any:
            self.seen.append("num_items_in_batch" in kwargs)
            return super().forward(input_ids, labels)

    class Own(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.model_accepts_loss_kwargs = accepts

    Model.seen = []
    trainer = make_trainer(tmp_path, Model(), tagging(8), cls=Own)
    trainer.train()
    assert trainer.model_accepts_loss_kwargs is accepts
    assert set(Model.seen) == {accepts}


def test_whether_the_loss_is_scaled_can_be_set_on_the_object(tmp_path: Path) -> None:
    class Own(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.loss_is_scaled_for_ga = True

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) / self.current_gradient_accumulation_steps

    own = make_trainer(tmp_path, Classifier(), classification(24), cls=Own, gradient_accumulation_steps=2)
    plain = make_trainer(tmp_path, Classifier(), classification(24), gradient_accumulation_steps=2)
    own.train()
    plain.train()
    assert losses(own) == pytest.approx(losses(plain))


def test_a_subclass_wraps_the_model_for_training(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.calls = inner, 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return self.inner(*args, **kwargs)

    class Own(Trainer):
        def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
            return Wrapper(super()._wrap_model(model, training, dataloader))

    trainer = make_trainer(tmp_path, Classifier(), classification(24), cls=Own)
    trainer.train()
    assert isinstance(trainer.model_wrapped, Wrapper)
    assert trainer.model_wrapped.calls == 6
    assert isinstance(trainer.model, Classifier)


def test_a_subclass_names_the_columns(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")

    class Own(Trainer):
        def _set_signature_columns_if_needed(self) -> None:
            if self._signature_columns is None:
                self._signature_columns = ["x", "labels", "more"]

    data = classification(8)
    rows = {"x": [s["x"].tolist() for s in data], "labels": [int(s["labels"]) for s in data]}
    dataset = datasets.Dataset.from_dict({**rows, "more": [1] * 8, "less": [2] * 8})
    trainer = make_trainer(tmp_path, Classifier(), dataset, cls=Own)
    assert set(next(iter(trainer.get_train_dataloader()))) == {"x", "labels", "more"}


def test_groups_under_the_names_that_subclasses_use(tmp_path: Path) -> None:
    class Own(Trainer):
        @staticmethod
        def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
            cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)
            return cls, {**kwargs, "optimizer_dict": [{"params": list(model.parameters()), "lr": 0.125}]}

    trainer = make_trainer(tmp_path, Classifier(), classification(8), cls=Own)
    assert trainer.create_optimizer().param_groups[0]["lr"] == 0.125


class Doubled(CallbackHandler):
    events: list[str] = []

    def call_event(self, event: str, *args: Any, **kwargs: Any) -> Any:
        self.events.append(event)
        return super().call_event(event, *args, **kwargs)


@pytest.mark.parametrize("on_the_class", [False, True])
def test_an_own_dispatch_of_events(tmp_path: Path, on_the_class: bool) -> None:
    trainer = make_trainer(tmp_path, Classifier(), classification(8))
    handler = trainer.callback_handler
    Doubled.events = []
    if on_the_class:
        trainer.callback_handler = Doubled(handler.callbacks, trainer.model)
    else:
        call = handler.call_event

        def call_event(event: str, *args: Any, **kwargs: Any) -> Any:
            Doubled.events.append(event)
            return call(event, *args, **kwargs)

        handler.call_event = call_event  # type: ignore[method-assign]
    trainer.train()
    assert {"on_train_begin", "on_step_end", "on_log", "on_train_end"} <= set(Doubled.events)
    assert len(losses(trainer)) == 2


def test_a_row_is_logged_in_the_mode_it_is_of(tmp_path: Path) -> None:
    class Own(Trainer):
        modes: list[tuple[bool, bool]] = []

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            self.modes.append(("eval_loss" in logs, self.model.training))
            super().log(logs, start_time)

    trainer = make_trainer(
        tmp_path, Classifier(), classification(8), cls=Own, eval_dataset=classification(8), eval_strategy="epoch"
    )
    trainer.train()
    assert Own.modes == [(False, True), (False, True), (True, False), (False, True)]


# ---- what a subclass is told


def test_a_method_that_is_never_called_is_named(tmp_path: Path, caplog: Any) -> None:
    class Own(Trainer):
        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError

        def _push_from_checkpoint(self, folder: str) -> None:
            raise AssertionError

        def _own_helper(self) -> None:
            raise AssertionError

    make_trainer(tmp_path, Classifier(), classification(8), cls=Own).train()
    told = [record.getMessage() for record in caplog.records if "never called" in record.getMessage()]
    assert len(told) == 1  # and of pushing only where something is pushed
    assert "Own._inner_training_loop is never called by paceline: override train" in told[0]


def test_the_table_knows_every_private_method_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.23")
    theirs = {
        name
        for name, value in vars(transformers.Trainer).items()
        if name.startswith("_") and not name.startswith("__") and inspect.isfunction(value)
    }
    assert theirs - set(dir(Trainer)) == set()
    # of version 4 alone
    assert {name for name in UNCALLED if not hasattr(Trainer, name)} == {
        "_activate_neftune", "_add_sm_patterns_to_gitignore", "_deactivate_neftune", "_fsdp_qlora_plugin_updates",
        "_gather_and_numpify", "ipex_optimize_model", "propagate_args_to_deepspeed", "torch_jit_model_eval",
    }  # fmt: skip


class LogsByItself(Trainer):
    """The whole of `_maybe_log_save_evaluate` anew, as libraries write it for the reference."""

    def _maybe_log_save_evaluate(
        self, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=None
    ):
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            loss = tr_loss.mean().item()
            tr_loss -= tr_loss
            logs = {"loss": loss / (self.state.global_step - self._globalstep_last_logged)}
            if grad_norm is not None:
                logs["grad_norm"] = grad_norm
            logs["learning_rate"] = learning_rate if learning_rate is not None else self._get_learning_rate()
            self._total_loss_scalar += loss
            self._globalstep_last_logged = self.state.global_step
            self.store_flos()
            self.log(logs, start_time)
        if self.control.should_evaluate:
            metrics = self._evaluate(trial, ignore_keys_for_eval)
            is_best = self._determine_best_metric(metrics=metrics, trial=trial)
            if self.args.save_strategy == "best":
                self.control.should_save = is_best
        if self.control.should_save:
            self._save_checkpoint(model, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)


@pytest.mark.parametrize("options", [{"save_strategy": "steps", "save_steps": 4}, {"save_strategy": "best"}])
def test_an_own_way_of_logging_evaluating_and_saving(tmp_path: Path, options: dict[str, Any]) -> None:
    found = []
    for cls in (Trainer, LogsByItself):
        trainer = make_trainer(
            tmp_path / cls.__name__,
            Classifier(),
            classification(24),
            cls=cls,
            eval_dataset=classification(8),
            logging_steps=3,
            max_steps=10,
            eval_strategy="steps",
            eval_steps=4,
            metric_for_best_model="loss",
            load_best_model_at_end=True,
            **options,
        )
        trainer.train()
        speeds = ("runtime", "per_second")
        rows = [{k: v for k, v in row.items() if not k.endswith(speeds)} for row in trainer.state.log_history]
        names = sorted(path.name for path in (tmp_path / cls.__name__).glob("checkpoint-*"))
        found.append((rows, names, trainer.state.best_global_step, trainer.state.best_metric))
    assert found[1] == found[0]


def test_what_no_run_calls_is_named_when_it_is_asked_for(tmp_path: Path) -> None:
    trainer: Any = make_trainer(tmp_path, Classifier(), classification(8))
    with pytest.raises(AttributeError, match=r"Trainer.torch_jit_model_eval does not exist: .* set torch_compile"):
        trainer.torch_jit_model_eval(trainer.model, None)
    with pytest.raises(AttributeError, match=r"its config is filled from the arguments when a run starts"):
        trainer.propagate_args_to_deepspeed()
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = trainer.nothing
    assert not hasattr(trainer, "_activate_neftune")

    class Broken(Trainer):
        @property
        def broken(self) -> int:
            raise AttributeError("from inside")

    with pytest.raises(AttributeError, match="from inside"):
        _ = make_trainer(tmp_path, Classifier(), classification(8), cls=Broken).broken


def test_the_older_name_of_the_evaluation_loop(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Classifier(), classification(8), eval_dataset=classification(8))
    loader = trainer.get_eval_dataloader()
    loops = (trainer.evaluation_loop, trainer.prediction_loop)
    found = [loop(loader, "Evaluation", metric_key_prefix="a") for loop in loops]
    assert found[1].metrics["a_loss"] == found[0].metrics["a_loss"]
    assert (found[1].predictions == found[0].predictions).all()


class NoLength:
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    "options", [{"num_train_epochs": 3}, {"num_train_epochs": 1.5}, {"max_steps": 7}, {"max_steps": 3, "stream": True}]
)
def test_the_length_of_a_run_as_transformers_tells_it(tmp_path: Path, options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.23")
    stream = "stream" in options
    options = {name: value for name, value in options.items() if name != "stream"}
    options |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer = make_trainer(tmp_path, Classifier(), classification(22), **options)
    theirs = transformers.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, **options)
    reference = transformers.Trainer(Classifier(), theirs, train_dataset=classification(22))
    found = []
    for each in (trainer, reference):
        loader = NoLength() if stream else each.get_train_dataloader()
        found.append(each.set_initial_training_values(each.args, loader))
    assert found[0] == found[1]


def test_arguments_beside_those_of_a_checkpoint(tmp_path: Path, caplog: Any) -> None:
    trainer = make_trainer(tmp_path, Classifier(), classification(8), logging_steps=2)
    trainer.train()
    trainer.compare_trainer_and_checkpoint_args(trainer.args, trainer.state)
    assert "checkpoint" not in caplog.text
    trainer.args.logging_steps, trainer.args.per_device_train_batch_size = 3, 2
    trainer.compare_trainer_and_checkpoint_args(trainer.args, trainer.state)
    assert "logging_steps is 3 and was 2; per_device_train_batch_size is 2 and was 4." in caplog.text


def test_the_batch_size_may_be_set_between_runs(tmp_path: Path) -> None:
    class Own(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            with pytest.raises(ValueError, match=r"_train_batch_size=1 cannot be set .* set it before train"):
                self._train_batch_size = 1
            return super().training_step(*args, **kwargs)

    trainer = make_trainer(tmp_path, Classifier(), classification(8), cls=Own)
    trainer._train_batch_size = 8
    assert trainer._train_batch_size == 8
    trainer.train()
    assert trainer.state.global_step == 1


def test_small_parts_of_the_public_surface(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Classifier(), classification(8))
    assert trainer.neftune_noise_alpha is None
    trainer.neftune_noise_alpha = 0.5
    assert trainer.args.neftune_noise_alpha == 0.5
    batches = [{"input_ids": torch.ones(2, 3)}, {"input_ids": torch.ones(1, 3)}]
    assert Trainer.num_tokens(batches) == 9
    assert Trainer.num_tokens(batches, max_steps=5) == 30
    assert Trainer.num_tokens([]) == 0
    trainer.end()
    assert not torch.distributed.is_initialized()
