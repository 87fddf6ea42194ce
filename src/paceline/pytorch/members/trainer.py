"""Trains several models of one architecture at once, over one pass of the data."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.args.adopt import adopt
from paceline.args.errors import UnsupportedOption
from paceline.args.members import Member, read_members
from paceline.args.training import TrainingArguments
from paceline.callbacks.early_stopping import EarlyStoppingCallback
from paceline.core import schedules
from paceline.core.contracts import StreamingMetric
from paceline.core.events import TrainerCallback
from paceline.core.metrics import StartTime, is_better
from paceline.core.outputs import PredictionOutput, TrainOutput
from paceline.pytorch import parts
from paceline.pytorch.data.loading import is_stream
from paceline.pytorch.distributed.random import preserved_rng, set_seed
from paceline.pytorch.evaluation import predictor
from paceline.pytorch.members import checks
from paceline.pytorch.members.data import MemberCollator, MemberRows, member_sampler, own_order
from paceline.pytorch.members.optimizer import MemberOptimizer
from paceline.pytorch.members.schedule import MemberSchedule
from paceline.pytorch.members.stack import MemberStack, Slice
from paceline.pytorch.members.watch import MemberWatch
from paceline.pytorch.optim import optimizers as optimizer_registry
from paceline.pytorch.optim.schedulers import METRIC_SCHEDULES
from paceline.pytorch.trainer import Trainer

logger = logging.getLogger(__name__)

FOLDER = "members"  # in the output folder: a folder for the model of each member
PREFIX = "eval"


@dataclass(frozen=True)
class MemberResult:
    """The result of one member.

    Attributes:
        name: its name.
        member: its settings.
        metrics: its last evaluation.
        best_metric: the best value of `metric_for_best_model`; None without evaluations.
        best_step: the optimizer step of it.
        stopped_step: the step at which early stopping ended it; None: not stopped.
        folder: the folder of its model; None if none was written.
    """

    name: str
    member: Member
    metrics: dict[str, float]
    best_metric: float | None
    best_step: int | None
    stopped_step: int | None
    folder: Path | None


def refused(name: str) -> Any:
    """Returns a method that raises UnsupportedOption."""

    def refuse(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedOption(
            f"{name} of a MembersTrainer is not supported: make a Trainer with the arguments `arguments_of(0)` for it."
        )

    return refuse


class MembersTrainer(Trainer):
    """Trains members at once: their parameters are stacked, and one forward and backward pass computes all of them.

    Each member is equal to its run alone, with the arguments of `arguments_of`, up to the rounding of batched kernels;
    members with dropout draw other masks than alone. Gradients are clipped per member, an `EarlyStoppingCallback` stops
    members one by one, and with `load_best_model_at_end` each member ends with its own best weights. `loss` in the log
    is the mean over members in training whose loss is finite; `loss/NAME`, `grad_norm/NAME`, `learning_rate/NAME` and
    `eval_*/NAME` are those of a member, and `eval_*` those of the best member.

    Args:
        model, args, ...: as for `Trainer`. With `model_init`, each member is initialized from its own seed; all
            members start from a given `model`. Frozen parameters, such as those below LoRA adapters, are stored once.
        members: two or more `Member` objects, or dicts of their settings.
        vectorize: False calls the members one after another in each step: slower, and for any module.

    Raises:
        ValueError: the members are invalid.
        UnsupportedOption: an option, the optimizer or the model does not allow it; the message names the remedy.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | StreamingMetric | None = None,
        callbacks: list[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        members: Sequence[Member | Mapping[str, Any]] | None = None,
        vectorize: bool = True,
        tokenizer: Any = None,
    ) -> None:
        args = adopt(args) if args is not None else TrainingArguments(output_dir="tmp_trainer")
        self.members = read_members(members)
        self.vectorize = vectorize
        self.member_max_grad_norm = float(args.max_grad_norm or 0.0)
        self._last_metrics: list[dict[str, float]] = [{} for _ in self.members]
        self._folders: list[Path | None] = [None] * len(self.members)
        self._is_checked = False
        checks.check_arguments(args, self.members)
        methods = (self.compute_loss, self.training_step, self.create_optimizer, self.create_scheduler)
        checks.check_methods(methods, optimizers)
        checks.check_callbacks(callbacks or [])
        self._check_seeds(model_init, train_dataset)
        self._watch = MemberWatch(self.members)
        super().__init__(
            model=None if model is None else self._stack_of(self._copies(model)),
            args=replace(args, max_grad_norm=0.0),  # the optimizer clips each member
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=[*self._without_stopping(callbacks or []), self._watch],
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            tokenizer=tokenizer,
        )
        if self.world.is_distributed:
            raise UnsupportedOption("MembersTrainer with several processes is not supported: start one process.")

    # ---- the members

    def _check_seeds(self, model_init: object, train_dataset: object) -> None:
        seeded = next((member for member in self.members if member.seed is not None), None)
        if seeded is not None and model_init is None:
            raise UnsupportedOption(
                f"Member(seed={seeded.seed}) is the seed of an initialization: give MembersTrainer model_init=... "
                "instead of model=..., or set data_seed."
            )
        if own_order(self.members) and train_dataset is not None and is_stream(train_dataset):
            raise UnsupportedOption("Member(data_seed, bootstrap) with a stream: give a dataset with a length.")

    def _copies(self, model: nn.Module) -> list[nn.Module]:
        """Returns a copy of a model for each member; the frozen parameters are the model's own."""
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        return [copy.deepcopy(model, {id(each): each for each in frozen}) for _ in self.members]

    def _stack_of(self, members: Sequence[nn.Module]) -> MemberStack:
        stack = MemberStack(members, self.vectorize)
        stack.per_member = own_order(self.members)
        return stack

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Returns a stack of models from `model_init`, each initialized from its member's seed."""
        made = []
        with preserved_rng():
            for member in self.members:
                set_seed(self.args.seed if member.seed is None else member.seed)
                made.append(super().call_model_init(trial))
        self._is_checked = False
        stack = self._stack_of(made)
        self._connect(stack)
        return stack

    def _without_stopping(self, callbacks: Sequence[Any]) -> list[Any]:
        """Returns the callbacks without early stopping, which the watch applies to each member."""
        for callback in callbacks:
            self._take_stopping(callback)
        return [callback for callback in callbacks if not is_stopping(callback)]

    def _take_stopping(self, callback: object) -> bool:
        if is_stopping(callback):
            made = callback() if isinstance(callback, type) else callback
            assert isinstance(made, EarlyStoppingCallback)
            checks.check_stopping(made, self._watch.stopping)
            self._watch.stop_by(made)
        return is_stopping(callback)

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Adds a callback; early stopping applies to each member."""
        checks.check_callbacks([callback])
        if not self._take_stopping(callback):
            super().add_callback(callback)

    @property
    def stack(self) -> MemberStack:
        """The members, stacked."""
        stack = self.strategy.unwrap(self.model)
        assert isinstance(stack, MemberStack)
        return stack

    def modules(self) -> list[nn.Module]:
        """Returns the members as modules of their own, in order; `ensemble_predict` takes them."""
        return [self.stack.member(number) for number in range(len(self.members))]

    def arguments_of(self, number: int) -> TrainingArguments:
        """Returns the arguments of the run alone that a member is equal to.

        With `bootstrap`, its training data is `Subset(train_dataset, bootstrap_places(size, seed))`.
        """
        member = self.members[number]
        options: dict[str, Any] = {
            name: getattr(member, name)
            for name in ("learning_rate", "weight_decay", "seed", "lr_scheduler_type", "lr_scheduler_kwargs")
            if getattr(member, name) is not None
        }
        if member.lr_scheduler_type is not None and member.lr_scheduler_kwargs is None:
            options["lr_scheduler_kwargs"] = {}
        options["data_seed"] = self._data_seed if member.data_seed is None else member.data_seed
        return replace(self.args, max_grad_norm=self.member_max_grad_norm, **options)

    def results(self) -> list[MemberResult]:
        """Returns the result of each member of the last run, in order."""
        watch = self._watch
        return [
            MemberResult(
                name=str(member.name),
                member=member,
                metrics=dict(self._last_metrics[number]),
                best_metric=watch.best_metric[number],
                best_step=watch.best_step[number],
                stopped_step=watch.stopped_step[number],
                folder=self._folders[number],
            )
            for number, member in enumerate(self.members)
        ]

    def best_member(self) -> int:
        """Returns the number of the member with the best `metric_for_best_model` (the evaluation loss by default).

        Raises:
            ValueError: no member has been evaluated.
        """
        best: int | None = None
        for number, value in enumerate(self._watch.best_metric):
            if value is None:
                continue
            known = None if best is None else self._watch.best_metric[best]
            if best is None or is_better(value, known, self._watch.greater_is_better):
                best = number
        if best is None:
            raise ValueError("best_member compares evaluations in training: set eval_strategy='steps' or 'epoch'.")
        return best

    # ---- the model

    def _read_model(self) -> None:
        """Reads the facts of a member, which all members share."""
        stack = self.model
        if not isinstance(stack, MemberStack):
            super()._read_model()
            return
        with self._shown(stack.module):
            super()._read_model()
        self.model_wrapped = stack
        self._connect(stack)

    def _connect(self, stack: MemberStack) -> None:
        def loss_of(model: nn.Module, inputs: object, num_items: object) -> Tensor:
            loss: Tensor = self.objective(model, inputs, num_items)[0]  # type: ignore[assignment]
            return loss

        stack.compute_with(loss_of)

    def _set_signature_columns_if_needed(self) -> None:
        model = self.model
        with self._shown(model.module if isinstance(model, MemberStack) else model):
            super()._set_signature_columns_if_needed()

    @contextmanager
    def _shown(self, module: nn.Module) -> Iterator[None]:
        """Gives the Trainer another module as its model for a while."""
        before = self.model, self.__dict__.get("model_wrapped")
        self.model = self.model_wrapped = module
        try:
            yield
        finally:
            self.model, self.model_wrapped = before[0], before[1] if before[1] is not None else before[0]

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Computes the mean loss of the members, whose gradient for each is that of its own loss."""
        stack = self.strategy.unwrap(model)
        if not isinstance(stack, MemberStack):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if not self._is_checked and torch.is_grad_enabled():
            self._check_stack(stack, inputs, num_items_in_batch)
        loss = model(inputs, num_items_in_batch)
        return (loss, {"loss": loss}) if return_outputs else loss

    def _check_stack(self, stack: MemberStack, inputs: object, num_items: object) -> None:
        """Runs the first batch before the first step, so that nothing is trained if the members cannot be."""
        if self.label_smoother is not None:  # sees by the numbers of one model if the loss is shifted
            with torch.no_grad(), preserved_rng():
                tensors, batch = stack.parts(stack.stacked(), inputs)[0]
                tensors = {name: each.clone() for name, each in tensors.items()}  # batch norm would change its buffers
                self.objective(Slice(stack.module, tensors), batch, num_items)  # type: ignore[arg-type]
        if stack.vectorize:
            checks.check_vectorized(stack, inputs, num_items, self.compute_loss_context_manager)
        self._is_checked = True

    # ---- data

    def get_train_dataloader(self) -> Any:
        """Returns the loader of the training data, with the samples of each member if they differ."""
        if self.train_dataset is None or not own_order(self.members):
            return super().get_train_dataloader()
        rows = MemberRows(self.train_dataset)
        return self._get_dataloader(
            rows, "training", self.args.train_batch_size, self._get_train_sampler, is_training=True
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if not isinstance(train_dataset, MemberRows):
            return super()._get_train_sampler(train_dataset)
        is_random = str(self.args.train_sampling_strategy) == "random"
        return member_sampler(len(train_dataset), self.members, self._data_seed, is_random)

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        collate = super()._get_collator_with_removed_columns(data_collator, description)
        is_own = description == "training" and own_order(self.members)
        return MemberCollator(collate, len(self.members)) if is_own else collate

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device | None = None) -> Any:
        """Returns the number of targets in an optimizer step; one per member if they read their own samples."""
        if not (self.is_in_train and own_order(self.members) and self.objective.wants_num_items and batch_samples):
            return super()._get_num_items_in_batch(batch_samples, device)
        raise UnsupportedOption(
            f"Member(data_seed, bootstrap) with {type(self.stack.module).__name__}, whose loss is divided by "
            "num_items_in_batch, which differs between members: set loss_weight, or let all members read the same "
            "batches."
        )

    # ---- optimizer and schedule

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Creates the optimizer, which steps each member with its own learning rate and weight decay."""
        if self.optimizer is None:
            module = self.stack.module
            made = [self._optimizer_of(module, number) for number in range(len(self.members))]
            settings = [[(group["lr"], group.get("weight_decay", 0.0)) for group in m.param_groups] for m in made]
            self.optimizer = MemberOptimizer(made[0], settings, self.member_max_grad_norm)
        return self.optimizer

    def _optimizer_of(self, module: nn.Module, number: int) -> torch.optim.Optimizer:
        args = self.arguments_of(number)
        given = self.optimizer_cls_and_kwargs
        if given is not None and self.members[number].learning_rate is not None:
            given = given[0], {**given[1], "lr": self.members[number].learning_rate}
        return optimizer_registry.create_optimizer(
            args,
            module,
            cls_and_kwargs=given or self.get_optimizer_cls_and_kwargs(args, module),
            decay_names=self.get_decay_parameter_names(module),
        )

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Creates the schedule of each member."""
        if self.lr_scheduler is None:
            self.optimizer = self.create_optimizer() if optimizer is None else optimizer
            each = len(self.optimizer.param_groups) // len(self.members)
            rates = [group["lr"] for group in self.optimizer.param_groups[::each]]
            factors = [self._factor(number, num_training_steps, rate) for number, rate in enumerate(rates)]
            self.lr_scheduler = MemberSchedule(self.optimizer, factors)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _factor(self, number: int, num_training_steps: int, rate: float) -> schedules.Multiplier:
        args = self.arguments_of(number)
        name = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
        if name in METRIC_SCHEDULES:
            raise UnsupportedOption(
                f"MembersTrainer: lr_scheduler_type={name!r} follows one metric for all members: choose one of "
                f"{', '.join(schedules.SCHEDULES)}."
            )
        return schedules.multiplier(
            name,
            num_warmup_steps=args.get_warmup_steps(num_training_steps),
            num_training_steps=num_training_steps,
            lr_init=rate,
            **dict(args.lr_scheduler_kwargs or {}),  # type: ignore[arg-type]
        )

    # ---- training

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Trains the members; see `Trainer.train`. Then writes the model of each to `members/NAME`, if saving is on."""
        plan = self._plan()
        watch, metric = self._watch, plan.metric_for_best_model or "loss"
        name = metric if metric.startswith(f"{PREFIX}_") else f"{PREFIX}_{metric}"
        watch.compare_by(name, bool(plan.greater_is_better), keeps_best=bool(self.args.load_best_model_at_end))
        watch.repeats_steps = plan.auto_find_batch_size
        self._is_checked = False
        output = super().train(*args, **kwargs)
        if self.args.save_strategy != "no":
            self.save_members()
        return output

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Loads the weights of a checkpoint.

        Raises:
            CheckpointError: it is one of other members.
        """
        with checks.loading_explained(len(self.members)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs a row; one of training steps gets the values of each member."""
        if "loss" in logs and isinstance(self.model, MemberStack):
            kinds = {
                "loss": self._watch.take_losses(),
                "grad_norm": self._watch.norms(),
                "learning_rate": self._watch.rates(),
            }
            for kind, values in kinds.items():
                logs |= {f"{kind}/{member.name}": v for member, v in zip(self.members, values, strict=False)}
        super().log(logs, start_time)

    # ---- evaluation

    def _evaluate_one(self, dataset: Any, ignore_keys: list[str] | None, prefix: str) -> dict[str, float]:
        if not isinstance(self.model, MemberStack):
            return super()._evaluate_one(dataset, ignore_keys, prefix)
        loader = self.get_eval_dataloader(dataset)
        self.callback_handler.eval_dataloader = loader
        start, stack = StartTime(), self.stack
        loss_only = True if self.compute_metrics is None else None
        each: list[dict[str, float]] = []
        with self.memory_stages.measuring("eval"), predictor.in_evaluation_mode(stack):
            for number in range(len(self.members)):
                module = stack.member(number, shares=True)
                with self._shown(module), predictor.in_evaluation_mode(module):
                    output = self.evaluation_loop(loader, "Evaluation", loss_only, ignore_keys, prefix)
                each.append(dict(output.metrics or {}))
            output = output._replace(metrics=self._together(each, prefix))
            metrics = parts.metrics_of(self, output, prefix, start, loader, dataset)
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            metrics.update(self.memory_stages.stop("eval"))
        self._share_control()
        return metrics

    def _together(self, each: list[dict[str, float]], prefix: str) -> dict[str, float]:
        """Returns the metrics of the best member, and those of each member under `KEY/NAME`."""
        self._last_metrics = each
        plan = self._plan()
        criterion = (plan.metric_for_best_model or "loss").removeprefix(f"{PREFIX}_")
        sets = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else ()
        named = [f"{name}_" for name in sets if criterion.startswith(f"{name}_")]
        criterion = criterion.removeprefix(max(named, key=len, default=""))  # names the metric of one of several sets
        key = f"{prefix}_{criterion}"
        best = 0
        for number, metrics in enumerate(each):
            if key in metrics and is_better(metrics[key], each[best].get(key), bool(plan.greater_is_better)):
                best = number
        found = dict(each[best])
        for member, metrics in zip(self.members, each, strict=True):
            found |= {f"{name}/{member.name}": value for name, value in metrics.items()}
        return found

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        *,
        augmentation: Any = None,
        member: int | None = None,
    ) -> PredictionOutput:
        """Returns the predictions of one member; see `Trainer.predict`, and `ensemble_predict` for those of all.

        Args:
            test_dataset, ignore_keys, metric_key_prefix, augmentation: as for `Trainer.predict`.
            member: its number; None: the best member.

        Raises:
            ValueError: there is no such member, or none has been evaluated.
        """
        predict = partial(super().predict, test_dataset, ignore_keys, metric_key_prefix, augmentation=augmentation)
        if not isinstance(self.model, MemberStack):
            return predict()
        chosen = self.best_member() if member is None else member
        if not 0 <= chosen < len(self.members):
            raise ValueError(f"predict(member={member!r}): expected a number from 0 to {len(self.members) - 1}.")
        with self._shown(self.stack.member(chosen, shares=True)):
            return predict()

    # each of these is about one model
    hyperparameter_search = refused("hyperparameter_search")
    find_lr = refused("find_lr")
    find_batch_size = refused("find_batch_size")
    measure_memory = refused("measure_memory")
    plan = refused("plan")
    doctor = refused("doctor")

    # ---- saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model of each member to `members/NAME` in a folder; a checkpoint has all of them in one file."""
        if _internal_call or not isinstance(self.model, MemberStack):
            super().save_model(output_dir, _internal_call)
        else:
            self.save_members(output_dir)

    def save_members(self, output_dir: str | None = None) -> list[Path]:
        """Saves the model of each member as `Trainer.save_model` does.

        Args:
            output_dir: gets the folders `members/NAME`; None: the output folder.

        Returns:
            The folders, which `from_pretrained`, or `load_state_dict` for plain modules, and `ensemble_predict` load.
        """
        base = (self._output_folder() if output_dir is None else Path(output_dir)) / FOLDER
        for number, member in enumerate(self.members):
            folder = base / str(member.name)
            with self._shown(self.stack.member(number, shares=True)):
                super().save_model(str(folder))
            self._folders[number] = folder
        return [folder for folder in self._folders if folder is not None]


def is_stopping(callback: object) -> bool:
    """True for early stopping, as a class or an instance."""
    kind = callback if isinstance(callback, type) else type(callback)
    return issubclass(kind, EarlyStoppingCallback)
