"""TrainingArguments: all options under flat names, with the attributes and methods that scripts use."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Self

from paceline.args import construction, launch_environment, serialize
from paceline.args.choices import (
    LOG_LEVELS,
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    ParallelMode,
    SaveStrategy,
    SchedulerType,
)
from paceline.args.coercion import coerce_option, to_mapping
from paceline.args.construction import defaults_of, derived_values
from paceline.args.errors import add_help
from paceline.args.older_names import OLDER_NAMES, Renamed, Retired, act_on_fields, check_retired
from paceline.args.option_files import read_mapping
from paceline.args.plan import check, half_format, resolve_warmup
from paceline.args.secrets import masked
from paceline.args.sections import Options

if TYPE_CHECKING:
    import torch

    from paceline.pytorch.distributed.world import World

logger = logging.getLogger(__name__)
ALIASES = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}


@dataclass(repr=False)
class TrainingArguments(Options, metaclass=construction.ArgumentsMeta):
    """All options of a run, documented at their declaration in `paceline.args.sections` and by `--help`.

    Names of earlier releases of transformers are accepted. Values are converted to the option's type on construction
    and on assignment. Rules between options are checked on construction and when a run starts. Settings of `accelerate
    launch` fill options that are not given. Construction touches no device and no global state.

    Raises:
        TypeError: an unknown option; the message names the closest known one.
        ValueError: an invalid value, or options that contradict each other.
        UnsupportedOption: an option that this version does not support.
    """

    # options that a command line passes as JSON; subclasses in other libraries add their own names to the list
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        "accelerator_config",
        "fsdp_config",
        "deepspeed",
        "activation_checkpointing_kwargs",
        "gradient_checkpointing_kwargs",
        "lr_scheduler_kwargs",
    ]
    # placeholders for accelerate's plugins, which libraries test for None
    deepspeed_plugin: ClassVar[Any] = None
    hf_deepspeed_config: ClassVar[Any] = None
    fsdp_plugin_args: ClassVar[Any] = None
    xla_fsdp_config: ClassVar[Any] = None
    default_optim: ClassVar[str] = "adamw_torch_fused"

    def _coerce_fields(self) -> None:
        for item in fields(self):
            value = coerce_option(type(self), item.name, getattr(self, item.name))
            if item.name in self._VALID_DICT_FIELDS and isinstance(value, str) and value.lstrip().startswith("{"):
                value = to_mapping(item.name, value)
            self.__dict__[item.name] = value
        for name in ("logging_steps", "eval_steps", "save_steps"):
            steps = getattr(self, name)
            if isinstance(steps, float) and steps.is_integer() and steps > 1:
                self.__dict__[name] = int(steps)

    def __post_init__(self) -> None:
        given = self.__dict__.pop(construction.GIVEN, ())
        told_before: frozenset[str] | None = self.__dict__.get(construction.TOLD)
        is_copy = told_before is not None
        self.__dict__.update(act_on_fields(self.__dict__, defaults_of(type(self)), type(self).__name__, given, is_copy))
        self._coerce_fields()
        told = self._take_from_launcher()
        for old, new in ALIASES.items():
            if getattr(self, new) is None:
                self.__dict__[new] = getattr(self, old)
        if self.activation_checkpointing is None:
            self.activation_checkpointing = False
        for old, new in ALIASES.items():
            self.__dict__[old] = getattr(self, new)
        if self.disable_tqdm is None:
            self.disable_tqdm = logging.getLogger("paceline").getEffectiveLevel() > logging.WARNING
        self._given: dict[str, Any] = {}
        self._assigned: frozenset[str] = frozenset()
        self._derive()
        try:
            check(self)
        except ValueError as error:
            add_help(error, told)
            raise
        notes = construction.surprises(self._given, self)
        for note in notes:
            if note not in (told_before or ()):
                logger.warning(note)
        self.__dict__[construction.TOLD] = frozenset([*notes, *(told_before or ())])

    def _take_from_launcher(self) -> str:
        """Fills options that are not given from `accelerate launch`. Returns a sentence that lists them."""
        taken, told = launch_environment.take(self, os.environ)
        for name, value in taken.items():
            self.__dict__[name] = coerce_option(type(self), name, value)
        if told and os.environ.get("RANK", "0") == "0":
            logger.info(told)
        return told

    def _derive(self) -> None:
        """Fills values that follow from other options and records the originals. Later assignments are kept."""
        self.__dict__.update(self._given)
        derived = {name: value for name, value in derived_values(self).items() if name not in self._assigned}
        changed = [name for name, value in derived.items() if getattr(self, name) != value]
        self.__dict__["_given"] = {name: getattr(self, name) for name in changed}
        self.__dict__.update(derived)

    def __setattr__(self, name: str, value: object) -> None:
        if "_given" not in self.__dict__:  # During construction; __post_init__ handles it.
            super().__setattr__(name, value)
            return
        entry = OLDER_NAMES.get(name)
        if isinstance(entry, Renamed):
            if name in self.__dict__:  # a subclass has its own field of that name
                self.__dict__[name] = coerce_option(type(self), name, value)
            if entry.read(getattr(self, entry.new)) != value:
                new_value = entry.convert(value)
                setattr(self, entry.new, getattr(type(self), entry.new) if new_value is None else new_value)
            return
        name = ALIASES.get(name, name)
        if name not in self.__dataclass_fields__:
            if isinstance(entry, Retired):
                check_retired(name, value, entry)
            super().__setattr__(name, value)
            return
        self.__dict__[name] = coerce_option(type(self), name, value)
        for old, new in ALIASES.items():
            self.__dict__[old] = getattr(self, new)
        self.__dict__["_assigned"] = self._assigned | {name}
        self.__dict__["_given"] = {key: item for key, item in self._given.items() if key != name}
        self._derive()

    def __getattr__(self, name: str) -> Any:
        """Reads renamed and retired options. Called only if there is no such attribute."""
        entry = OLDER_NAMES.get(name)
        if "_given" in self.__dict__ and entry is not None:
            return entry.read(getattr(self, entry.new)) if isinstance(entry, Renamed) else entry.unset
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        lines = [f"    {name}={value!r},\n" for name, value in sorted(masked(self.to_dict()).items())]
        return f"{type(self).__name__}(\n{''.join(lines)})"

    # Numbers.

    @property
    def train_batch_size(self) -> int:
        """The samples per process in one training micro-batch."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """The samples per process in one evaluation batch."""
        return self.per_device_eval_batch_size

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """`ddp_timeout` as a duration."""
        return timedelta(seconds=self.ddp_timeout)

    @property
    def mixed_precision(self) -> str:
        """The autocast format: "no", "fp16" or "bf16"."""
        return half_format(self.fp16, self.bf16) or "no"

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Returns the warmup steps in a run of `num_training_steps` optimizer steps."""
        return resolve_warmup(self.warmup_steps, num_training_steps)

    # Device and processes; the first access initializes them.

    def _world(self) -> World:
        from paceline.pytorch.distributed.world import (
            current_world,  # The one sanctioned upward call (docs/architecture.md).
        )

        return current_world(self)

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._world().device

    @property
    def _setup_devices(self) -> torch.device:
        """The device of this process, under the name that some scripts use to initialize it."""
        return self.device

    @property
    def n_gpu(self) -> int:
        """The number of accelerators of this process: 0 or 1."""
        return self._world().n_gpu

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self._world().world_size

    @property
    def process_index(self) -> int:
        """The global rank of this process."""
        return self._world().process_index

    @property
    def local_process_index(self) -> int:
        """The local rank of this process."""
        return self._world().local_process_index

    @property
    def parallel_mode(self) -> ParallelMode:
        """The parallelism of the run: distributed, XLA, or none."""
        if self.device.type == "xla":
            return ParallelMode.TPU
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def distributed_state(self) -> Any:
        """accelerate's state of this process, for code that reads it from the arguments; None without accelerate."""
        from paceline.pytorch.distributed.world import process_state

        return process_state(bool(self.use_cpu))

    @property
    def should_log(self) -> bool:
        """True if this process writes the log."""
        return (self.local_process_index if self.log_on_each_node else self.process_index) == 0

    @property
    def should_save(self) -> bool:
        """True if this process writes files."""
        return (self.local_process_index if self.save_on_each_node else self.process_index) == 0

    @property
    def place_model_on_device(self) -> bool | None:
        """True if the Trainer must move the model to the device; None lets it decide. May be overridden."""
        return None

    @property
    def _no_sync_in_gradient_accumulation(self) -> bool:
        """True if gradients are reduced only with the last micro-batch of an accumulation window."""
        return True

    def get_process_log_level(self) -> int:
        """Returns the logging level of this process, as a number of the `logging` module.

        "passive" means the level of this package's logger or, if unset, of transformers' logger, whose verbosity
        scripts set. Scripts pass the result to their own loggers.
        """
        level = LOG_LEVELS[self.log_level if self.should_log else self.log_level_replica]
        if level != -1:
            return level
        name = "paceline" if logging.getLogger("paceline").level else "transformers"
        return logging.getLogger(name).getEffectiveLevel()

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Runs the block on the main process before all others.

        Args:
            local: True uses the main process of each machine, False that of the run.
            desc: description of the work for the log.
        """
        from paceline.pytorch.distributed.world import first_before_others  # The one sanctioned upward call.

        index = self.local_process_index if local else self.process_index
        logger.debug("process %d: %s", index, desc)
        with first_before_others(self._world(), index == 0):
            yield

    def _validate_args(self) -> None:
        """Checks the rules between options."""
        check(self)

    # To and from plain values.

    def _dict_dtype_to_str(self, d: dict[str, Any]) -> None:
        """Replaces each `dtype` in nested dicts by its name ("float32"), in place. For overridden `to_dict` methods."""
        if d.get("dtype") is not None:
            d["dtype"] = str(d["dtype"]).removeprefix("torch.")
        for value in d.values():
            if isinstance(value, dict):
                self._dict_dtype_to_str(value)

    def to_dict(self) -> dict[str, Any]:
        """Returns all options in plain types; placeholders replace secrets."""
        return serialize.options_to_dict(self)

    def to_json_string(self) -> str:
        """Returns `to_dict` as JSON, secrets masked everywhere."""
        return serialize.to_json_text(masked(self.to_dict()))

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Returns `to_dict` and the batch sizes as numbers, booleans and text only, for trackers and files.

        Secrets are masked everywhere.
        """
        values = {**self.to_dict(), "train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        return serialize.as_written(values)

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Writes the options to a JSON file."""
        serialize.write_text(path, self.to_json_string() + "\n")

    def to_yaml(self, path: str | os.PathLike[str]) -> None:
        """Writes the options to a YAML file."""
        serialize.write_text(path, serialize.to_yaml_text(masked(self.to_dict())))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Builds arguments from a dict returned by `to_dict` of this package or of transformers.

        In such a dict, values that follow from other options (`greater_is_better` from the metric) are derived anew
        when those are assigned; in one with some options they are the user's own.
        """
        return construction.forget_derived(cls(**serialize.without_placeholders(values)), values)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Self:
        """Builds arguments from a JSON file."""
        return cls.from_dict(read_mapping(path))

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> Self:
        """Builds arguments from a YAML file."""
        return cls.from_dict(read_mapping(path))

    # Setters: each sets a group of options and returns the arguments. As in transformers, options that are not given
    # are reset to the default shown.

    def set_training(
        self,
        learning_rate: float = 5e-5,
        batch_size: int = 8,
        weight_decay: float = 0,
        num_epochs: float = 3,
        max_steps: int = -1,
        gradient_accumulation_steps: int = 1,
        seed: int = 42,
        activation_checkpointing: bool = False,
        gradient_checkpointing: bool | None = None,
    ) -> Self:
        """Sets the length and batch size of training; sets `do_train`."""
        return self._set(
            do_train=True,
            learning_rate=learning_rate,
            per_device_train_batch_size=batch_size,
            weight_decay=weight_decay,
            num_train_epochs=num_epochs,
            max_steps=max_steps,
            gradient_accumulation_steps=gradient_accumulation_steps,
            seed=seed,
            activation_checkpointing=(
                activation_checkpointing if gradient_checkpointing is None else gradient_checkpointing
            ),
        )

    def set_evaluate(
        self,
        strategy: str | IntervalStrategy = "no",
        steps: int = 500,
        batch_size: int = 8,
        accumulation_steps: int | None = None,
        delay: float | None = None,
        loss_only: bool = False,
    ) -> Self:
        """Sets the evaluation strategy; sets `do_eval`."""
        return self._set(
            do_eval=strategy != IntervalStrategy.NO,
            eval_strategy=strategy,
            eval_steps=self._counted("eval", strategy, steps),
            per_device_eval_batch_size=batch_size,
            eval_accumulation_steps=accumulation_steps,
            eval_delay=delay,
            prediction_loss_only=loss_only,
        )

    def set_testing(self, batch_size: int = 8, loss_only: bool = False) -> Self:
        """Sets the options of prediction; sets `do_predict`."""
        return self._set(do_predict=True, per_device_eval_batch_size=batch_size, prediction_loss_only=loss_only)

    def set_save(
        self,
        strategy: str | SaveStrategy = "steps",
        steps: int = 500,
        total_limit: int | None = None,
        on_each_node: bool = False,
    ) -> Self:
        """Sets the checkpoint strategy and the number of checkpoints to keep."""
        return self._set(
            save_strategy=strategy,
            save_steps=self._counted("save", strategy, steps),
            save_total_limit=total_limit,
            save_on_each_node=on_each_node,
        )

    def set_logging(
        self,
        strategy: str | IntervalStrategy = "steps",
        steps: int = 500,
        report_to: str | list[str] = "none",
        level: str = "passive",
        first_step: bool = False,
        nan_inf_filter: bool = False,
        on_each_node: bool = False,
        replica_level: str = "passive",
    ) -> Self:
        """Sets the logging strategy and reporters."""
        return self._set(
            logging_strategy=strategy,
            logging_steps=self._counted("logging", strategy, steps),
            report_to=report_to,
            log_level=level,
            logging_first_step=first_step,
            logging_nan_inf_filter=nan_inf_filter,
            log_on_each_node=on_each_node,
            log_level_replica=replica_level,
        )

    def set_push_to_hub(
        self,
        model_id: str,
        strategy: str | HubStrategy = "every_save",
        token: str | None = None,
        private_repo: bool | None = None,
        always_push: bool = False,
        revision: str | None = None,
    ) -> Self:
        """Sets the options of pushes to the hub; sets `push_to_hub`."""
        return self._set(
            push_to_hub=True,
            hub_model_id=model_id,
            hub_strategy=strategy,
            hub_token=token,
            hub_private_repo=private_repo,
            hub_always_push=always_push,
            hub_revision=revision,
        )

    def set_optimizer(
        self,
        name: str | OptimizerNames = "adamw_torch",
        learning_rate: float = 5e-5,
        weight_decay: float = 0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        args: str | None = None,
    ) -> Self:
        """Sets the optimizer."""
        return self._set(
            optim=name,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            adam_beta1=beta1,
            adam_beta2=beta2,
            adam_epsilon=epsilon,
            optim_args=args,
        )

    def set_lr_scheduler(
        self,
        name: str | SchedulerType = "linear",
        num_epochs: float = 3.0,
        max_steps: int = -1,
        warmup_steps: float = 0,
    ) -> Self:
        """Sets the learning-rate schedule, and with it the length of the run."""
        return self._set(
            lr_scheduler_type=name, num_train_epochs=num_epochs, max_steps=max_steps, warmup_steps=warmup_steps
        )

    def set_dataloader(
        self,
        train_batch_size: int = 8,
        eval_batch_size: int = 8,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | None = None,
        in_order: bool = True,
        auto_find_batch_size: bool = False,
        ignore_data_skip: bool = False,
        sampler_seed: int | None = None,
    ) -> Self:
        """Sets the options of data loading."""
        return self._set(
            per_device_train_batch_size=train_batch_size,
            per_device_eval_batch_size=eval_batch_size,
            dataloader_drop_last=drop_last,
            dataloader_num_workers=num_workers,
            dataloader_pin_memory=pin_memory,
            dataloader_persistent_workers=persistent_workers,
            dataloader_prefetch_factor=prefetch_factor,
            dataloader_multiprocessing_context=multiprocessing_context,
            dataloader_in_order=in_order,
            auto_find_batch_size=auto_find_batch_size,
            ignore_data_skip=ignore_data_skip,
            data_seed=sampler_seed,
        )

    def _set(self, **values: Any) -> Self:
        """Sets several options; each is converted as on construction."""
        for name, value in values.items():
            setattr(self, name, value)
        return self

    @staticmethod
    def _counted(kind: str, strategy: str, steps: int) -> int:
        """Returns the steps of an interval that is counted in optimizer steps."""
        if strategy == IntervalStrategy.STEPS and steps == 0:
            raise ValueError(
                "Setting `strategy` as 'steps' requires a positive value for `steps`: "
                f"{kind}_steps=0 is invalid with {kind}_strategy='steps'."
            )
        return steps
