"""The declaration of every option: its name, type, default, and help text.

The sections are combined by inheritance into `Options`, flat and in the order of transformers; behaviour is in
`paceline.args.training`. A section is never instantiated, so the methods of a dataclass are not generated: they would
be compiled at each import.
"""

# ruff: noqa: RUF009  (option() makes a dataclass field, not a value shared by instances)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.args.accelerator_config import AcceleratorConfig
from paceline.args.choices import (
    APEX_LEVELS,
    AVERAGE_DEVICES,
    BACKENDS,
    LAYER_LOSSES,
    LOG_LEVELS,
    LOSS_WEIGHTS,
    METRIC_INPUTS,
    PACKINGS,
    PRECISION_BACKENDS,
    START_METHODS,
    STATE_DTYPES,
    DebugOption,
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    SaveStrategy,
    SchedulerType,
)
from paceline.args.registry import SAMPLERS

if TYPE_CHECKING:
    HeadOption = str | bool
else:
    HeadOption = str  # the parser of transformers reads `str | bool` as bool, and then refuses "auto"


def option(default: object, text: str, choices: Sequence[str] | None = None, is_switch: bool = False) -> Any:
    """Returns a documented dataclass field.

    Args:
        choices: the strings it accepts, for the parser and for validation.
        is_switch: True if the flag may be given without a value, which means True. A plain `bool` always may; for other
            types this is stored as metadata, which transformers' parser reads too.
    """
    metadata: dict[str, Any] = {"help": text}
    if choices is not None:
        metadata["choices"] = list(choices)
    if is_switch:
        metadata.update(nargs="?", const=True)
    if default is list:
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(init=False, repr=False, eq=False)
class RunSection:
    """Output location."""

    output_dir: str | None = option(
        None,
        "Folder for checkpoints, logs and the record of the run; or a URL (s3://bucket/run, gs://, az://), which "
        "becomes output_store, with a local folder in the user's cache. Unset: ./trainer_output.",
    )


@dataclass(init=False, repr=False, eq=False)
class TrainSection:
    """Length and batch size of training."""

    per_device_train_batch_size: int = option(8, "Samples in one training micro-batch, per process.")
    num_train_epochs: float = option(
        3.0, "Number of epochs; a fraction trains that part of the last epoch. max_steps overrides it."
    )
    max_steps: int = option(
        -1,
        "Number of optimizer steps; overrides num_train_epochs, and the data is repeated as often as needed. "
        "-1: use num_train_epochs. Required for data without a length.",
    )


@dataclass(init=False, repr=False, eq=False)
class ScheduleSection:
    """Learning-rate schedule."""

    learning_rate: float = option(5e-5, "Peak learning rate, which the schedule multiplies.")
    lr_scheduler_type: SchedulerType | str = option(
        SchedulerType.LINEAR, "Learning-rate schedule, one of the names of get_scheduler."
    )
    lr_scheduler_kwargs: dict[str, Any] | str | None = option(
        None, 'Further settings of the schedule, as a dict or JSON, for instance {"num_cycles": 2}.'
    )
    warmup_steps: float = option(
        0, "Optimizer steps over which the learning rate rises from 0 to its peak; below 1, a ratio of all steps."
    )


@dataclass(init=False, repr=False, eq=False)
class OptimSection:
    """Optimizer."""

    optim: OptimizerNames | str = option(
        OptimizerNames.ADAMW_TORCH_FUSED,
        "Optimizer by name; 'auto' chooses one by device, dtype and memory and logs the reason.",
    )
    optim_args: str | None = option(None, "Further settings of the optimizer, as 'name=value,name=value'.")
    weight_decay: float = option(0.0, "Decoupled weight decay. Biases and the weights of norm layers are excluded.")
    adam_beta1: float = option(0.9, "Decay rate of the first moment, for the Adam family.")
    adam_beta2: float = option(0.999, "Decay rate of the second moment, for the Adam family.")
    adam_epsilon: float = option(1e-8, "Epsilon in the denominator, for the Adam family.")
    optim_target_modules: None | str | list[str] = option(  # noqa: RUF036  transformers' parser takes the 2nd member.
        None,
        "Modules for GaLore, APOLLO or Muon: parts of names, one regex, or 'all-linear'.",
    )


@dataclass(init=False, repr=False, eq=False)
class UpdateSection:
    """Optimizer step: accumulation, clipping and loss."""

    gradient_accumulation_steps: int = option(
        1, "Micro-batches whose gradients are accumulated for one optimizer step. All step counts are optimizer steps."
    )
    average_tokens_across_devices: bool = option(
        True, "Divide the loss by the number of targets over all processes, not by each process's own."
    )
    max_grad_norm: float = option(
        1.0, "Maximum L2 norm of the gradients; larger ones are scaled down to it. 0 disables clipping."
    )
    label_smoothing_factor: float = option(
        0.0, "Label smoothing: share of the target probability spread evenly over all classes, from 0 to below 1."
    )


@dataclass(init=False, repr=False, eq=False)
class PrecisionSection:
    """Precision."""

    bf16: bool = option(False, "Mixed precision: forward and backward in bfloat16 autocast; weights keep their dtype.")
    fp16: bool = option(False, "Mixed precision: forward and backward in float16 autocast, with a gradient scaler.")
    bf16_full_eval: bool = option(False, "Cast the model to bfloat16 for evaluation and prediction.")
    fp16_full_eval: bool = option(False, "Cast the model to float16 for evaluation and prediction.")
    tf32: bool | None = option(
        None, "Allow (or forbid) TF32 matrix products on the GPU. Unset: torch's setting.", is_switch=True
    )


@dataclass(init=False, repr=False, eq=False)
class ActivationSection:
    """Activation checkpointing."""

    activation_checkpointing: bool | None = option(
        None, "Recompute activations in the backward pass: less memory, about a third more compute.", is_switch=True
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = option(
        None,
        "Settings of activation checkpointing, as a dict or JSON: every_n_layers, offload (to host memory), and those "
        "of torch.utils.checkpoint, such as use_reentrant.",
    )
    gradient_checkpointing: bool | None = option(
        None, "Older name of activation_checkpointing; both always have the same value.", is_switch=True
    )
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = option(
        None, "Older name of activation_checkpointing_kwargs; both always have the same value."
    )


@dataclass(init=False, repr=False, eq=False)
class CompileSection:
    """Compilation and kernels."""

    torch_compile: bool = option(
        False, "Compile the model with torch.compile: its repeated blocks where it has them, see compile_regions."
    )
    torch_compile_backend: str | None = option(
        None, "Backend of torch.compile; setting it enables torch_compile. Unset: inductor."
    )
    torch_compile_mode: str | None = option(
        None, "Mode of torch.compile, such as 'reduce-overhead' or 'max-autotune'; setting it enables torch_compile."
    )
    use_liger_kernel: bool = option(False, "Replace supported layers by Liger kernels (package liger-kernel).")
    liger_kernel_config: dict[str, bool] | None = option(
        None, "Liger kernels to enable or disable: rope, cross_entropy, fused_linear_cross_entropy, rms_norm, swiglu."
    )


@dataclass(init=False, repr=False, eq=False)
class ModelSection:
    """Model and memory during training."""

    use_cache: bool = option(False, "Keep the model's key-value cache enabled during training; rarely useful.")
    neftune_noise_alpha: float | None = option(
        None, "Scale of the uniform noise added to input embeddings during training (NEFTune, arXiv 2310.05914)."
    )
    torch_empty_cache_steps: int | None = option(
        None, "Optimizer steps between two releases of cached device memory: lower peak memory, slower steps."
    )
    auto_find_batch_size: bool = option(
        False, "After an out-of-memory, halve the micro-batch and double the accumulation: the same global batch size."
    )


@dataclass(init=False, repr=False, eq=False)
class LogSection:
    """Logging."""

    logging_strategy: IntervalStrategy | str = option(
        IntervalStrategy.STEPS, "Interval of training logs: 'no', 'steps' (every logging_steps), 'epoch'."
    )
    logging_steps: float = option(500, "Optimizer steps between two logs; below 1, a ratio of all steps.")
    logging_first_step: bool = option(False, "Log the first optimizer step too.")
    log_on_each_node: bool = option(True, "With several machines, log on each of them rather than on the first only.")
    logging_nan_inf_filter: bool = option(
        True, "Exclude non-finite losses from the logged mean and log their number. Gradients are not changed."
    )
    include_num_input_tokens_seen: str = option(
        "no",
        "Count the input tokens: 'all', 'non_padding', or 'no'. True means 'all', False 'no'.",
        is_switch=True,
    )
    log_level: str = option(
        "passive", "Level of the package's logger on the main process; 'passive' does not set it.", tuple(LOG_LEVELS)
    )
    log_level_replica: str = option(
        "warning", "Level of the package's logger on all other processes.", tuple(LOG_LEVELS)
    )
    disable_tqdm: bool | None = option(
        None, "Disable progress bars. Unset: only if the package's logger is set above WARNING.", is_switch=True
    )
    report_to: None | str | list[str] = option(  # noqa: RUF036  As above.
        "none", "Reporters for the logs: a name, a list of names, 'all' for those installed and configured, or 'none'."
    )
    run_name: str | None = option(None, "Name of the run, for reporters.")
    project: str = option("huggingface", "Project of W&B, or experiment of MLflow, if the environment names none.")
    trackio_space_id: str | None = option(None, "Hub Space that the Trackio reporter syncs to.")
    trackio_bucket_id: str | None = option(None, "Hub bucket that the Trackio reporter stores its data in.")
    trackio_static_space_id: str | None = option(
        None, "Static hub Space that the Trackio reporter exports to at the end; False: none."
    )


@dataclass(init=False, repr=False, eq=False)
class EvalSection:
    """Evaluation."""

    eval_strategy: IntervalStrategy | str = option(
        IntervalStrategy.NO, "Interval of evaluations: 'no', 'steps' (every eval_steps), 'epoch'."
    )
    eval_steps: float | None = option(
        None, "Optimizer steps between two evaluations; below 1, a ratio of all steps. Unset: logging_steps."
    )
    eval_delay: float = option(0, "Epochs (or steps, with eval_strategy='steps') before the first evaluation.")
    per_device_eval_batch_size: int = option(8, "Samples in one evaluation batch, per process.")
    prediction_loss_only: bool = option(False, "Return only the loss from evaluation and prediction.")
    eval_on_start: bool = option(False, "Evaluate once before the first optimizer step.")
    eval_do_concat_batches: bool = option(
        True, "Concatenate the predictions of all batches into one array each. False: a list with one entry per batch."
    )
    eval_use_gather_object: bool = option(
        False, "Gather evaluation results as Python objects, so that they need not be tensors."
    )
    eval_accumulation_steps: int | None = option(
        None, "Evaluation batches whose results are kept on the device before they are moved to the host. Unset: 1."
    )


@dataclass(init=False, repr=False, eq=False)
class MetricSection:
    """Input of compute_metrics."""

    include_for_metrics: list[str] = option(
        list, "Additional input of compute_metrics: 'inputs', 'loss'.", METRIC_INPUTS
    )
    batch_eval_metrics: bool = option(
        False,
        "Call compute_metrics on each batch, given as tensors, and on the last one with compute_result=True, so that "
        "memory is constant.",
    )


@dataclass(init=False, repr=False, eq=False)
class SaveSection:
    """Checkpoints."""

    save_only_model: bool = option(
        False, "Save only the weights in checkpoints: smaller, but training cannot be resumed from them."
    )
    save_strategy: SaveStrategy | str = option(
        SaveStrategy.STEPS,
        "Interval of checkpoints: 'no', 'steps' (every save_steps), 'epoch', 'best' (at a new best metric).",
    )
    save_steps: float = option(500, "Optimizer steps between two checkpoints; below 1, a ratio of all steps.")
    save_on_each_node: bool = option(False, "With several machines, save on each of them, for local disks.")
    save_total_limit: int | None = option(
        None, "Checkpoints to keep; older ones are deleted, except the best and the newest. Unset or 0: no limit."
    )
    enable_jit_checkpoint: bool = option(
        False,
        "Write a checkpoint when the process receives a stop signal, also with save_strategy='no'. Other strategies do "
        "so without this option: see stop_signals.",
    )


@dataclass(init=False, repr=False, eq=False)
class HubSection:
    """Model hub."""

    push_to_hub: bool = option(False, "Push the model to the hub.")
    hub_token: str | None = option(
        None, "Hub token. Unset: the token of the hub's login. It is never written to a file."
    )
    hub_private_repo: bool | None = option(None, "Create the hub repository as private.", is_switch=True)
    hub_model_id: str | None = option(None, "Hub repository to push to, as 'name' or 'owner/name'.")
    hub_strategy: HubStrategy | str = option(
        HubStrategy.EVERY_SAVE, "Content and interval of pushes: 'end', 'every_save', 'checkpoint', 'all_checkpoints'."
    )
    hub_always_push: bool = option(
        False, "Push every checkpoint. False: the newest replaces those that wait for a push."
    )
    hub_revision: str | None = option(None, "Branch of the hub repository to push to; created if missing.")


@dataclass(init=False, repr=False, eq=False)
class BestSection:
    """Best model."""

    load_best_model_at_end: bool = option(
        False, "After training, load the checkpoint with the best evaluation, which is never deleted during training."
    )
    metric_for_best_model: str | None = option(
        None, "Evaluation metric of the best model, with or without the prefix eval_. Unset: loss."
    )
    greater_is_better: bool | None = option(
        None,
        "True if larger values of metric_for_best_model are better. Unset: True unless its name ends in 'loss'.",
        is_switch=True,
    )


@dataclass(init=False, repr=False, eq=False)
class ResumeSection:
    """Resuming a run."""

    ignore_data_skip: bool = option(
        False, "On resume, start the data from the beginning rather than at the checkpoint's position."
    )
    restore_callback_states_from_checkpoint: bool = option(
        False, "On resume, restore the callbacks' constructor arguments too, not only their state."
    )


@dataclass(init=False, repr=False, eq=False)
class SeedSection:
    """Seeds and device."""

    full_determinism: bool = option(False, "Use deterministic kernels only: bitwise reproducible, slower.")
    seed: int = option(42, "Random seed of the run.")
    data_seed: int | None = option(None, "Random seed of the data order. Unset: seed.")
    use_cpu: bool = option(False, "Train on the CPU even if there is an accelerator.")


@dataclass(init=False, repr=False, eq=False)
class EngineSection:
    """Settings of accelerate."""

    accelerator_config: dict[str, Any] | str | AcceleratorConfig | None = option(
        None, "Settings of the data-parallel loader under accelerate's names: a dict, JSON, or the path of a JSON file."
    )
    parallelism_config: dict[str, Any] | str | None = option(
        None,
        "Sizes of the mesh axes under accelerate's names (dp_shard_size, tp_size, ...): its ParallelismConfig, a dict, "
        "or JSON. See parallel.",
    )


@dataclass(init=False, repr=False, eq=False)
class DataSection:
    """Data loading."""

    dataloader_drop_last: bool = option(False, "Drop a last incomplete training batch; evaluation uses every sample.")
    dataloader_num_workers: int = option(0, "Worker processes that load data; 0 loads it in the main process.")
    dataloader_pin_memory: bool = option(True, "Pin the host memory of batches, for faster copies to a GPU.")
    dataloader_persistent_workers: bool = option(False, "Keep the worker processes alive between epochs.")
    dataloader_prefetch_factor: int | None = option(None, "Batches that a worker prefetches. Unset: torch's default.")
    dataloader_multiprocessing_context: str | None = option(
        None, "Start method of worker processes. Unset: Python's default.", START_METHODS
    )
    dataloader_in_order: bool = option(
        True, "Return batches in the order of the sampler. False: in training, in the order in which workers finish."
    )
    remove_unused_columns: bool = option(True, "Drop dataset columns that are not arguments of the model's forward.")
    label_names: list[str] | None = option(
        None, "Names of the inputs that are labels. Unset: inferred from the signature of the model's forward."
    )
    train_sampling_strategy: str = option(
        "random",
        "Order of the training samples: shuffled, sequential, in batches of similar length, or with the padded cost "
        "balanced over the micro-batches of an optimizer step.",
        tuple(SAMPLERS),
    )
    length_column_name: str = option("length", "Column with the length of each sample, for sampling by length.")


@dataclass(init=False, repr=False, eq=False)
class ParallelSection:
    """Distributed training."""

    ddp_find_unused_parameters: bool | None = option(
        None, "DistributedDataParallel's find_unused_parameters. Unset: inferred from the model.", is_switch=True
    )
    ddp_bucket_cap_mb: int | None = option(None, "DistributedDataParallel's bucket size, in MB.")
    ddp_broadcast_buffers: bool | None = option(None, "DistributedDataParallel's broadcast_buffers.", is_switch=True)
    ddp_static_graph: bool | None = option(None, "DistributedDataParallel's static_graph.", is_switch=True)
    ddp_backend: str | None = option(None, "Backend of the process group. Unset: chosen by device.", BACKENDS)
    ddp_timeout: int = option(1800, "Timeout of collectives, in seconds.")
    fsdp: str | None = option(
        None, "Shard the model across processes (fully_shard): True, or the older option words.", is_switch=True
    )
    fsdp_config: dict[str, Any] | str | None = option(
        None, "Settings of fsdp: a dict, JSON, or the path of a JSON file."
    )
    deepspeed: dict[str, Any] | str | None = option(
        None, "DeepSpeed's configuration: a dict, JSON, or the path of a JSON file."
    )


@dataclass(init=False, repr=False, eq=False)
class DebugSection:
    """Diagnostics."""

    debug: str | list[DebugOption] = option(
        "",
        "Diagnostics to run, separated by spaces: underflow_overflow (infinities and NaN in any module), "
        "tpu_metrics_debug (torch_xla's metrics, printed at the end of each epoch).",
    )
    skip_memory_metrics: bool = option(
        True, "Do not add the memory use of each stage (init, train, eval, test) to the metrics."
    )


@dataclass(init=False, repr=False, eq=False)
class ScriptSection:
    """Flags for scripts. The Trainer reads resume_from_checkpoint only."""

    do_train: bool = option(False, "Flag for scripts: train.")
    do_eval: bool = option(False, "Flag for scripts: evaluate. Set if eval_strategy is not 'no'.")
    do_predict: bool = option(False, "Flag for scripts: predict on the test set.")
    resume_from_checkpoint: str | None = option(
        None,
        "Checkpoint that train() resumes from if its own argument is unset: a folder or URL; 'true': the newest valid "
        "one, which must exist; 'auto': that one if there is one; 'false': start over. Unset: start over (TFTrainer: "
        "'auto').",
    )
    local_rank: int = option(-1, "Set by older launchers and ignored; the environment variable LOCAL_RANK is used.")


@dataclass(init=False, repr=False, eq=False)
class AverageSection:
    """Averages of the weights, with which the model is evaluated and saved."""

    ema_decay: float | None = option(
        None,
        "Evaluate and save the model with an exponential moving average of its weights: the share of the average that "
        "each optimizer step keeps, such as 0.999. Unset: no average.",
    )
    ema_warmup: bool = option(
        True,
        "Let ema_decay rise with the number n of optimizer steps, as (1 + n) / (10 + n), so that the first weights are "
        "soon forgotten.",
    )
    swa_start: float | None = option(
        None,
        "Evaluate and save the model with the mean of its weights from this optimizer step on, or from this fraction "
        "of the run if below 1 (stochastic weight averaging). Unset: no average.",
    )
    swa_lr: float | None = option(None, "Learning rate from swa_start on. Unset: that of the schedule.")
    swa_anneal_steps: int = option(
        0, "Optimizer steps in which the learning rate moves linearly from the schedule to swa_lr. 0: at once."
    )
    average_steps: int | None = option(
        None,
        "Optimizer steps from one update of the average to the next. Unset: 1 for ema_decay; an epoch for swa_start.",
    )
    average_device: str = option(
        "model", "Memory that holds the average: that of the 'model', or of the host ('cpu').", AVERAGE_DEVICES
    )


@dataclass(init=False, repr=False, eq=False)
class DistillationSection:
    """Knowledge distillation: training with the outputs of a teacher."""

    teacher: str | None = option(
        None,
        "Folder of a model of transformers whose outputs the model is trained on, too; Trainer(teacher=...) takes a "
        "module. Unset: no distillation.",
    )
    distillation_temperature: float = option(
        2.0,
        "Temperature of the soft loss: the logits of both models are divided by it, the loss multiplied by its square.",
    )
    distillation_alpha: float = option(
        0.5, "Weight of the soft loss, the divergence from the teacher, from 0 to 1; the hard loss has the rest."
    )
    distillation_top_k: int | None = option(
        None,
        "Number of the teacher's most likely classes that the soft loss distinguishes; all others count as one class. "
        "Unset: all classes.",
    )
    distillation_layers: dict[str, str] | str | None = option(
        None,
        "Modules of the model whose outputs are compared with those of the teacher's modules, as {'model.layer': "
        "'teacher.layer'}; a dict or JSON. Where widths differ, a linear projection is trained.",
    )
    distillation_layer_loss: str = option(
        "mse", "Loss of the hidden states: mean squared error, or one minus the cosine.", LAYER_LOSSES
    )
    distillation_layer_weight: float = option(1.0, "Weight of the loss of the hidden states.")
    distillation_cache: str | None = option(
        None,
        "Folder in which the logits of the teacher are kept: computed once before training, and read in each epoch and "
        "by later runs with this teacher and dataset. Unset: the teacher runs in each training pass.",
    )


@dataclass(init=False, repr=False, eq=False)
class PacelineSection(AverageSection, DistillationSection):
    """Options of paceline only."""

    loss_weight: str | None = option(
        None,
        "Unit over which the model's loss is a mean: samples, tokens, or tokens after the shift by one; 'scaled' if it "
        "is already divided for the global batch; 'sum' if it is a sum; or, in Python, a function (batch) -> float "
        "that returns the weight of a micro-batch. Unset: inferred from the model's class and from additional forward "
        "passes.",
        LOSS_WEIGHTS,
    )
    linear_cross_entropy: HeadOption = option(
        "auto",
        "Compute the cross-entropy of a linear head in chunks of tokens, without the logits of a whole batch: 'auto' "
        "where that was verified to be the model's own loss, the logits are large and nothing else reads them; True or "
        "the name of the head among the model's modules, for any size, and an error where it is not possible; 'liger': "
        "as True, by the fused kernel of liger-kernel; False: never.",
        is_switch=True,
    )
    nonfinite_policy: str = option(
        "warn",
        "On a loss or gradient that is not finite: 'warn'; 'skip' the optimizer step, while the learning-rate schedule "
        "advances (not with fp16); 'raise'; or 'rollback' to the last good state and skip the offending samples. "
        "Checked when metrics are read: at each log, evaluation and save.",
        ("warn", "skip", "raise", "rollback"),
    )
    save_in_background: bool = option(
        True,
        "Save checkpoints asynchronously: copy them to host memory and write them in the background. Training waits if "
        "the files are needed at once (a callback's on_save, an overridden _save) or memory is short, with a log line.",
    )
    save_full_log_history: bool = option(
        False,
        "Write all rows of the log into trainer_state.json of each checkpoint. Otherwise, from 8,192 rows on, it holds "
        "the newest rows, and log_history/ beside it the earlier ones, in files that checkpoints share. A "
        "checkpoint of the run's last step, and save_state(), always write all.",
    )
    checkpoint_format: str | None = option(
        None,
        "'full': rank 0 writes the full model; 'sharded': each rank writes its shard, which any number of processes "
        "can load and `paceline export` consolidates. Unset: state_dict_type in fsdp_config, or 'full'.",
        ("full", "sharded"),
    )
    output_store: str | None = option(
        None,
        "URL of an object store that the output folder is uploaded to asynchronously, each checkpoint complete or not "
        "at all, and that a run is resumed from if the folder is lost. Unset: output_dir, if that is a URL.",
    )
    keep_best: int = option(
        0, "Keep the N best checkpoints by evaluation, in addition to those of the other keep_ options."
    )
    keep_best_metric: str | None = option(
        None,
        "Evaluation metric of keep_best. Unset: metric_for_best_model, with greater_is_better. Of another metric, "
        "larger is better unless its name ends in 'loss'; names of errors, such as wer, are refused.",
    )
    keep_every_steps: int = option(0, "Keep each checkpoint at a multiple of N optimizer steps. 0 disables it.")
    keep_every_hours: float = option(
        0.0, "Keep the first checkpoint, and then one per N hours of training. 0 disables it."
    )
    stop_signals: bool = option(
        True,
        "On SIGTERM, SIGUSR1 or Ctrl-C, finish the optimizer step and write a checkpoint, if saving is on. train() "
        "then returns; after Ctrl-C it raises KeyboardInterrupt.",
    )
    compile_regions: bool | None = option(
        None,
        "With torch_compile, what is compiled: True: each repeated block by itself, whose compilation is much shorter; "
        "False: the whole model. Unset: the blocks, if most of the model is in blocks that are alike.",
        is_switch=True,
    )
    torch_compile_dynamic: bool | None = option(
        None,
        "Shapes of a compiled model. True: of any size from the first compilation on; False: one compilation per "
        "shape. Unset: compiled for the first shape, and for any size where later ones differ.",
        is_switch=True,
    )
    compile_cache_dir: str | None = option(
        None,
        "Folder of a trusted file system in which the results of torch_compile with the backend inductor are kept "
        "between runs. Unset: torch's own temporary folder.",
    )
    activation_memory_budget: float | None = option(
        None,
        "With torch_compile, the share of the activations that compiled code keeps for the backward pass, from 0 to 1; "
        "it recomputes the others, those that cost least first. Unset: as much as is fastest.",
    )
    activation_offload: bool = option(
        False, "Keep the activations of the forward pass in host memory until the backward pass needs them."
    )
    fp8: bool = option(
        False,
        "Compute linear layers in 8-bit floating point with torchao, on GPUs that support it (NVIDIA from compute "
        "capability 8.9 on, AMD MI300). Needs bf16=True.",
    )
    eval_spill_gb: float = option(
        0.25,
        "Memory limit in GB for the predictions of an evaluation; past it they are moved to a temporary file. 'inf': "
        "always in memory.",
    )
    half_precision_backend: str = option(
        "auto",
        "Backend of fp16=True: torch's autocast ('auto', 'amp'), or NVIDIA's Apex ('apex') for scripts that use it.",
        PRECISION_BACKENDS,
    )
    fp16_opt_level: str = option("O1", "With half_precision_backend='apex': the level of apex.amp.", APEX_LEVELS)
    parallel: dict[str, int] | str | None = option(
        None,
        "Parallelism of several processes: 'ddp' (a replica of the model on each), 'fsdp' (a shard of the model on "
        "each), or sizes of mesh axes, as a dict or as 'dp_shard=2,tp=2': dp_replicate and dp_shard (data "
        "parallelism), cp (context parallelism) or sp (sequence parallelism, Ulysses), tp (tensor parallelism), pp "
        "(pipeline parallelism); -1 takes all remaining processes. Unset: 'ddp', or 'fsdp' if fsdp is set. Start "
        "processes with `paceline launch`, torchrun, accelerate launch or srun. 'xla': one process, on XLA devices "
        "(torch_xla).",
    )
    pipeline_config: dict[str, Any] | str | None = option(
        None,
        "Settings of pipeline parallelism: schedule ('1f1b', 'gpipe' or 'interleaved_1f1b'), stages_per_process, "
        "micro_batches (minimum per optimizer step). A dict or JSON. Unset: 1f1b, one stage per process, at least as "
        "many micro-batches as stages.",
    )
    tp_plan: dict[str, Any] | str | None = option(
        None,
        "Tensor-parallel plan: maps module names, with '*' for one part of a name, to styles ('colwise', 'rowwise', "
        "...). A dict, JSON, or the path of a JSON file. Unset: the model's own plan.",
    )
    ddp_comm_hook: str | None = option(
        None, "Reduce gradients in 16 bits: 'fp16' or 'bf16'. Unset: in their own dtype.", ("fp16", "bf16")
    )
    tpu_num_cores: int | None = option(
        None,
        "Number of XLA devices, one or all: with all, each takes a shard of every batch and a replica of the model. "
        "Unset: one, or all if fsdp_config shards the model over them.",
    )
    profile: dict[str, Any] | str | None = option(
        None,
        "Record optimizer steps with torch.profiler: traces of each rank in output_dir/profile, and a table of the "
        "slowest operations. 'steps=10-15' (or '10-15+100-102'), or a schedule of wait, warmup, active and repeat; "
        "memory, stacks and shapes in addition: 'steps=10-15,memory,stacks', a dict, or JSON. True: the steps 10-12.",
        is_switch=True,
    )
    pruning: dict[str, Any] | str | float | None = option(
        None,
        "Prune linear and convolutional layers to this sparsity while the model trains; or a dict or JSON with the "
        "arguments of the callback Pruning: sparsity, method, unit, scope, schedule, start, end, every, modules, "
        "exclude, heads. Unset: no pruning.",
    )
    eval_samples: int | str | dict[str, Any] = option(
        0,
        "Rows of the evaluation set, fixed by a seed, whose generated text or predictions are written as a table at "
        "each evaluation, in the log, the report and the trackers; images also as a figure. Or a dict or JSON with "
        "some of num, seed, max_new_tokens, prompt_tokens, generation, picture_shape.",
    )
    eval_harness: list[str] | str | dict[str, Any] | None = option(
        None,
        "Tasks of the lm-evaluation-harness that are run at each evaluation: their names, or a dict or JSON with the "
        "arguments of the callback EvaluationHarness: tasks, num_fewshot, limit, include_path, batch_size, every, "
        "bootstrap_iters, model_args, evaluate_args. Needs lm-eval. Unset: none.",
    )
    snapshot_ensemble: int | str | bool = option(
        False,
        "Save the model at the end of each cycle of lr_scheduler_type='cosine_with_restarts', as members of an "
        "ensemble, in the folder snapshots of output_dir; a number n: keep those of the last n cycles.",
        is_switch=True,
    )
    log_resources: bool = option(
        False,
        "Add the use of CPU, memory, disk, network and NVIDIA GPUs to the rows that trackers get, sampled each second "
        "(psutil; nvidia-ml-py for GPUs).",
    )
    log_flops: bool = option(
        False,
        "Count the model's floating-point operations, once per shape of a micro-batch, and add FLOP/s and their share "
        "of the device's peak (MFU) to the rows that callbacks and trackers get.",
    )
    gradient_noise_scale: bool = option(
        False,
        "Estimate the gradient noise scale, in samples, from the gradients of the first micro-batch and of the whole "
        "optimizer step, and add it to the rows that callbacks and trackers get. It is about the batch size up to "
        "which larger batches pay off. Needs gradient_accumulation_steps of 2 or more.",
    )
    regularizers: list[Any] | str | None = option(
        None,
        "Regularizers of the training, which run in the order of their stages: a list of names, or of names with their "
        "settings, as JSON or YAML: [mixup: {alpha: 0.2}, cutmix, sam: {rho: 0.05}]. Names: mixup, "
        "cutmix, sam, dp_sgd. In Python also Mixup(0.2), CutMix(1.0), SAM(0.05), DPSGD(...), or a subclass of "
        "Regularizer. See docs/regularizers.md.",
    )
    data_map: bool = option(
        False,
        "Record loss, confidence, margin and forgetting events of each training sample, and write data_map.csv, "
        "data_map.svg and the likely label errors at the end of the run.",
    )
    log_token_metrics: bool = option(
        False,
        "Log the accuracy of the tokens with the largest logit, the entropy of the predictions and the perplexity of "
        "the training targets since the last row: mean_token_accuracy, entropy, perplexity; those of an evaluation get "
        "its prefix (eval_perplexity). They are computed beside each cross-entropy of the loss, in chunks where the "
        "loss is. See docs/speed.md.",
    )
    z_loss_weight: float = option(
        0.0,
        "Add the squared logarithm of the softmax's normalizer to each cross-entropy of the training loss, with this "
        "weight (1e-4 is usual), and log it as z_loss. Evaluation losses are without it.",
    )
    loss_by_source: str | None = option(
        None,
        "Log the training loss of each source of the data as loss/<source>: the entry of the training samples (dicts) "
        "that names their source, as MixedDataset(..., source_column=...) and MixedStream add it. See "
        "docs/mixing.md.",
    )
    logging_dir: str | None = option(
        None, "Folder of the TensorBoard files. Unset: TENSORBOARD_LOGGING_DIR, else output_dir/runs/<date>_<host>."
    )
    packing: str | None = option(
        None,
        "Train without padding: 'pack' puts whole samples into rows of packing_length tokens, 'flatten' into one row, "
        "'group' makes batches of similar length. Samples in a row do not attend to each other. Unset: padded batches.",
        PACKINGS,
    )
    packing_length: int | None = option(
        None,
        "Tokens of a row for packing='pack'. Unset: per_device_train_tokens, else rows of nearly the same length in "
        "each micro-batch.",
    )
    per_device_train_tokens: int | None = option(
        None,
        "Maximum number of tokens in one training micro-batch, padding included, per process: samples of similar "
        "length, or, with packing, whole rows. Unset: per_device_train_batch_size samples.",
    )
    batch_size_warmup: dict[str, Any] | str | list[Any] | None = option(
        None,
        "Begin with a smaller global batch size, by fewer micro-batches per optimizer step: {'start': samples, "
        "'steps': optimizer steps} for a linear rise to the full size, or a list of [step, samples] that ends at it. "
        "Sizes are over all processes, in whole micro-batches. Unset: gradient_accumulation_steps micro-batches.",
    )
    sequence_length_warmup: dict[str, Any] | str | list[Any] | None = option(
        None,
        "Begin with shorter sequences: training samples are cut to {'start': tokens, 'end': tokens, 'steps': optimizer "
        "steps}, linearly in multiples of 8 tokens ('multiple'), and whole after that; or to a list of [step, tokens], "
        "where None means whole. Unset: whole samples.",
    )
    phases: list[Any] | str | None = option(
        None,
        "Train in phases, one after the other: a list of Phase(name, until=..., freeze=[patterns], learning_rate=..., "
        "train_dataset=..., ...), or of dicts with these settings; see docs/phases.md. Unset: the run is one phase.",
    )
    optimizer_in_backward: bool = option(
        False,
        "Step each parameter inside the backward pass and free its gradient, so that gradients are never all in "
        "memory. On one process, or with parallel='fsdp'; without accumulation, clipping and fp16.",
    )
    optimizer_state_dtype: str = option(
        "float32",
        "Dtype of the optimizer's moments between steps: 'float32', or 'bfloat16', rounded stochastically, in half the "
        "memory.",
        STATE_DTYPES,
    )


@dataclass(init=False, repr=False, eq=False)
class Options(
    # Dataclass fields are collected from the last base to the first: read this list from the bottom.
    PacelineSection,
    ScriptSection,
    DebugSection,
    ParallelSection,
    DataSection,
    EngineSection,
    SeedSection,
    ResumeSection,
    BestSection,
    HubSection,
    SaveSection,
    MetricSection,
    EvalSection,
    LogSection,
    ModelSection,
    CompileSection,
    ActivationSection,
    PrecisionSection,
    UpdateSection,
    OptimSection,
    ScheduleSection,
    TrainSection,
    RunSection,
):
    """All options under flat names, in the order of `RunSection` to `PacelineSection`."""
