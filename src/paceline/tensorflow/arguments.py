"""TFTrainingArguments: the options of TrainingArguments plus those of TensorFlow; torch-only options are refused."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.args.choices import SchedulerType
from paceline.args.errors import UnsupportedOption
from paceline.args.redeclared import own_options
from paceline.args.rules import is_default, is_off
from paceline.args.sections import option
from paceline.args.serialize import as_written
from paceline.args.training import TrainingArguments

ONE_PROGRAM = "TensorFlow shares the work through tf.distribute: hand a strategy to TFTrainer; leave it out"
NO_WORKERS = "TensorFlow loads data in threads: use tf.data with num_parallel_calls and prefetch; leave it out"
NO_COMPILE = "TensorFlow compiles with XLA: set xla=True; leave it out"
NO_TEACHER = "distillation is of the torch Trainer; compute its loss in the model; leave it out"
NO_SWA_RATE = "hand a schedule that ends in this rate to TFTrainer; leave it out"
NO_CHECKPOINTING = "wrap layers in tf.recompute_grad; leave it out"
# name: (True if the value is the neutral one, the replacement)
UNSUPPORTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "accelerator_config": (lambda value: not getattr(value, "changed", dict)(), ONE_PROGRAM),
    "activation_checkpointing": (is_off, NO_CHECKPOINTING),
    "activation_checkpointing_kwargs": (is_off, NO_CHECKPOINTING),
    "activation_memory_budget": (is_default(None), NO_CHECKPOINTING),
    "activation_offload": (is_off, "TensorFlow keeps them on the device; leave it out"),
    "average_tokens_across_devices": (bool, "all replicas share one count here; leave it out"),
    "average_device": (is_default("model"), "the average is where the weights are; leave it out"),
    "batch_size_warmup": (is_off, "only the torch Trainer has it; leave it out"),
    "checkpoint_format": (lambda value: value in (None, "full"), ONE_PROGRAM),
    "compile_cache_dir": (is_off, NO_COMPILE),
    "compile_regions": (is_off, NO_COMPILE),
    "data_map": (is_off, "torch records it; leave it out"),
    "loss_by_source": (is_off, "evaluate each source; leave it out"),
    "dataloader_in_order": (bool, NO_WORKERS),
    "dataloader_num_workers": (is_off, NO_WORKERS),
    "ddp_backend": (is_off, ONE_PROGRAM),
    "ddp_broadcast_buffers": (is_default(None), ONE_PROGRAM),
    "ddp_bucket_cap_mb": (is_off, ONE_PROGRAM),
    "ddp_comm_hook": (is_off, ONE_PROGRAM),
    "ddp_find_unused_parameters": (is_off, ONE_PROGRAM),
    "ddp_static_graph": (is_off, ONE_PROGRAM),
    "ddp_timeout": (is_default(1800), ONE_PROGRAM),
    "debug": (
        lambda value: "tpu_metrics_debug" not in value,
        "these are counters of torch_xla, and tf.profiler shows what a TPU does; leave tpu_metrics_debug out",
    ),
    "deepspeed": (is_off, ONE_PROGRAM),
    "distillation_alpha": (is_default(0.5), NO_TEACHER),
    "distillation_cache": (is_off, NO_TEACHER),
    "distillation_layer_loss": (is_default("mse"), NO_TEACHER),
    "distillation_layer_weight": (is_default(1.0), NO_TEACHER),
    "distillation_layers": (is_off, NO_TEACHER),
    "distillation_temperature": (is_default(2.0), NO_TEACHER),
    "distillation_top_k": (is_off, NO_TEACHER),
    "eval_use_gather_object": (is_off, "each worker evaluates every sample, and nothing is gathered; leave it out"),
    "eval_harness": (is_off, "the harness calls models of torch here; leave it out"),
    "eval_samples": (is_off, "call trainer.log_table in on_evaluate; leave it out"),
    "fp8": (is_off, "torchao is of torch; leave it out"),
    "fsdp": (is_off, ONE_PROGRAM),
    "fsdp_config": (is_off, ONE_PROGRAM),
    "gradient_noise_scale": (is_off, "torch measures it; leave it out"),
    "half_precision_backend": (lambda value: value != "apex", "Apex is of torch; leave it out"),
    "liger_kernel_config": (is_off, NO_COMPILE),
    "log_token_metrics": (is_off, "give compile() the metrics, or compute them in compute_metrics; leave it out"),
    "z_loss_weight": (is_off, "add it in compute_loss; leave it out"),
    "log_flops": (is_off, "torch counts them; leave it out"),
    "linear_cross_entropy": (
        is_default("auto", False),
        "TensorFlow's loss is that of the compiled model; leave it out",
    ),
    "neftune_noise_alpha": (is_off, "add the noise in the model; leave it out"),
    "optim_target_modules": (is_off, "low-rank optimizers are of the torch side; leave it out"),
    "optimizer_in_backward": (is_off, "TensorFlow computes all gradients in one tape; leave it out"),
    "optimizer_state_dtype": (
        is_default("float32"),
        "Keras keeps the moments in the dtype of the variables; leave it out",
    ),
    "output_store": (is_off, "upload the output folder when the run has ended; leave it out"),
    "packing": (is_off, "use train_sampling_strategy='group_by_length'"),
    "packing_length": (is_off, "leave it out, as packing is of the torch side"),
    "parallel": (is_off, ONE_PROGRAM),
    "per_device_train_tokens": (is_off, "set per_device_train_batch_size; leave it out"),
    "parallelism_config": (is_off, ONE_PROGRAM),
    "pipeline_config": (is_off, ONE_PROGRAM),
    "profile": (is_off, "call tf.profiler.experimental.start and stop in a callback; leave it out"),
    "regularizers": (is_off, "these are passes of torch; write them into the model or the tf.data pipeline"),
    "pruning": (is_off, "only the torch Trainer has it; leave it out"),
    "sequence_length_warmup": (is_off, "cut the samples in the tf.data pipeline; leave it out"),
    "snapshot_ensemble": (is_off, "save the model in a callback at the end of each cycle; leave it out"),
    "swa_anneal_steps": (is_off, NO_SWA_RATE),
    "swa_lr": (is_default(None), NO_SWA_RATE),
    "teacher": (is_off, NO_TEACHER),
    "torch_compile": (is_off, NO_COMPILE),
    "torch_compile_dynamic": (is_default(None), NO_COMPILE),
    "torch_empty_cache_steps": (is_off, "TensorFlow keeps its own memory; leave it out"),
    "tp_plan": (is_off, ONE_PROGRAM),
    "tpu_num_cores": (
        is_default(None),
        "a TPUStrategy takes all cores: hand one with a device_assignment to TFTrainer; leave it out",
    ),
    "train_sampling_strategy": (
        is_default("random", "sequential", "group_by_length"),
        "use 'random', 'sequential' or 'group_by_length'",
    ),
    "use_cache": (is_off, "set it in the model's config, which is left as it is; leave it out"),
    "use_liger_kernel": (is_off, NO_COMPILE),
}

# name in `optim` -> (Keras class, True if it takes Adam's betas and epsilon)
OPTIMIZERS: Mapping[str, tuple[str, bool]] = {
    "auto": ("AdamW", True),
    "adamw_torch": ("AdamW", True),
    "adamw_torch_fused": ("AdamW", True),
    "adamw_torch_xla": ("AdamW", True),
    "adam": ("Adam", True),
    "nadam": ("Nadam", True),
    "sgd": ("SGD", False),
    "rmsprop": ("RMSprop", False),
    "adagrad": ("Adagrad", False),
    "adafactor": ("Adafactor", False),
    "lion_32bit": ("Lion", False),
    "muon": ("Muon", False),
    "schedule_free_adamw": ("ScheduleFreeAdamW", True),
}


@dataclass(repr=False)
class TFTrainingArguments(TrainingArguments):
    """The options of a run with TensorFlow: those of `TrainingArguments`, and five more.

    Options that only torch supports are refused, and the error names the replacement. `bf16_full_eval` and
    `fp16_full_eval` compute evaluations under Keras' mixed policies, which keep the dtype of the weights.
    `skip_memory_metrics=False` measures CPU memory. `debug="underflow_overflow"` checks weights, features, layers and
    losses of optimizer steps, and gradients unless the loss is scaled. Creating the arguments does not import
    TensorFlow; the first use of `strategy` and its dependents does.

    Raises:
        UnsupportedOption: an option is not supported with TensorFlow.
    """

    tpu_name: str | None = option(
        None, "Name of the Cloud TPU to train on, or 'local' on a TPU machine. Unset: the TPU that there is, if any."
    )
    tpu_zone: str | None = option(None, "Zone of the named Cloud TPU. Unset: found by the machine's metadata.")
    gcp_project: str | None = option(None, "Google Cloud project of the named Cloud TPU. Unset: as for the zone.")
    poly_power: float = option(
        1.0, "Power of the polynomial that the learning rate falls along, with lr_scheduler_type='linear'. 1: a line."
    )
    xla: bool = option(False, "Compile forward and backward with XLA: jit_compile of tf.function.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tensorflow(self)

    # Devices: the first access imports TensorFlow and creates the strategy.

    def _devices(self) -> Any:
        return importlib.import_module("paceline.tensorflow.devices")

    def _world(self) -> Any:
        return self._devices().current_world(self)

    @property
    def strategy(self) -> Any:
        """Returns the `tf.distribute.Strategy` of these arguments, created once.

        It is for the first of: a named TPU, several workers of TF_CONFIG, several GPUs, one GPU, the CPU.

        Raises:
            ValueError: the named TPU cannot be reached.
        """
        if "_strategy" not in self.__dict__:
            self.__dict__["_strategy"] = self._devices().make_strategy(self)
        return self.__dict__["_strategy"]

    @property
    def _setup_strategy(self) -> Any:
        """Returns the strategy; some scripts access it under this name to initialize the devices."""
        return self.strategy

    @property
    def n_replicas(self) -> int:
        """Returns the number of replicas that share an optimizer step, over all workers."""
        return int(self.strategy.num_replicas_in_sync)

    @property
    def train_batch_size(self) -> int:
        """Returns the number of samples in one training micro-batch, over all replicas."""
        return self.per_device_train_batch_size * self.n_replicas

    @property
    def eval_batch_size(self) -> int:
        """Returns the number of samples in one evaluation batch, over all replicas."""
        return self.per_device_eval_batch_size * self.n_replicas

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Returns `to_dict` with numbers, booleans and text only, and with all secrets masked.

        The batch sizes are left out, since computing them would create a strategy.
        """
        return as_written(self.to_dict())

    @property
    def distributed_state(self) -> None:
        """Returns None: TensorFlow has no accelerate state."""
        return None


def check_tensorflow(args: TFTrainingArguments) -> None:
    """Refuses options that the TensorFlow side does not support.

    Raises:
        ValueError: an option has an invalid value.
        UnsupportedOption: only torch supports an option, or a combination is not supported.
    """
    args = own_options(args)
    for name, (asks_nothing, remedy) in UNSUPPORTED.items():
        value = getattr(args, name)
        if not asks_nothing(value):
            shown = [str(item) for item in value] if isinstance(value, list) else value
            raise UnsupportedOption(f"{name}={shown!r} is not supported with TensorFlow: {remedy}.")
    if args.xla and "underflow_overflow" in args.debug:
        raise UnsupportedOption(
            "debug='underflow_overflow' is not supported with xla=True, which compiles the layers away: leave one of "
            "them out."
        )
    check_optimizer(str(args.optim))
    check_rates(args.phases or ())  # type: ignore[arg-type]  # as read from the option
    for half, other in (("bf16", "fp16"), ("fp16", "bf16")):
        if getattr(args, half) and getattr(args, f"{other}_full_eval"):
            raise UnsupportedOption(
                f"{half}=True with {other}_full_eval=True is not supported with TensorFlow: layers that compute in one "
                f"16-bit type are not switched to the other. Set {half}_full_eval, or leave {other}_full_eval out."
            )
    if args.poly_power <= 0:
        raise ValueError(f"poly_power={args.poly_power} is invalid: expected a value above 0.")
    if args.poly_power != 1.0 and args.lr_scheduler_type not in (SchedulerType.LINEAR, SchedulerType.POLYNOMIAL):
        raise ValueError(
            f"poly_power={args.poly_power} belongs to a polynomial decay, not to lr_scheduler_type="
            f"'{args.lr_scheduler_type}': leave one of them out."
        )
    for name in ("tpu_zone", "gcp_project"):
        if getattr(args, name) is not None and args.tpu_name is None:
            raise ValueError(f"{name}={getattr(args, name)!r} locates a named TPU: set tpu_name too.")


def check_rates(phases: Iterable[Any]) -> None:
    """Refuses several learning rates in one training phase, of which a Keras optimizer has one.

    Raises:
        UnsupportedOption: a phase has rates by pattern, or by depth.
    """
    for phase in phases:
        asked = {
            "learning_rate": phase.learning_rate if isinstance(phase.learning_rate, Mapping) else None,
            "layer_decay": phase.layer_decay,
        }
        for setting, value in asked.items():
            if value is not None:
                raise UnsupportedOption(
                    f"phases[{phase.name!r}].{setting}={value!r} is not supported with TensorFlow, whose optimizers "
                    "have one learning rate: give a number, and train the layers in different phases."
                )


def check_optimizer(name: str) -> None:
    """Refuses an optimizer that Keras lacks.

    Raises:
        UnsupportedOption: Keras has no optimizer for this value of `optim`.
    """
    if name not in OPTIMIZERS:
        raise UnsupportedOption(
            f"optim={name!r} is not supported with TensorFlow: choose one of {', '.join(OPTIMIZERS)}, or "
            "leave it out and pass optimizers=(a Keras optimizer, None)."
        )
