"""Every option of a run, in sections: its name, its type, its default, and the one text that explains it.

The sections are joined by inheritance into `Options`, flat and in the order users know; behaviour lives in
`paceline.args.training`. A section is never made by itself, so it needs none of the methods of
a dataclass, which would be compiled at each import.
"""

# ruff: noqa: RUF009  (option() makes a dataclass field, not a value shared by instances)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.args.accelerator_config import AcceleratorConfig
from paceline.args.choices import (
    APEX_LEVELS,
    BACKENDS,
    LOG_LEVELS,
    LOSS_WEIGHTS,
    METRIC_INPUTS,
    PRECISION_BACKENDS,
    SAMPLING_STRATEGIES,
    START_METHODS,
    DebugOption,
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    SaveStrategy,
    SchedulerType,
)


def option(default: Any, text: str, choices: Sequence[str] | None = None) -> Any:
    """A documented field. `choices` are the strings it takes, for the parser and for the check of the value."""
    metadata: dict[str, Any] = {"help": text}
    if choices is not None:
        metadata["choices"] = list(choices)
    if default is list:
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(init=False, repr=False, eq=False)
class RunSection:
    """Where the run writes."""

    output_dir: str | None = option(
        None,
        "Folder that receives checkpoints, logs and the record of the run; or a URL (s3://bucket/run, gs://, az://), "
        "which becomes output_store, with a folder in the user's cache. Unset: ./trainer_output.",
    )


@dataclass(init=False, repr=False, eq=False)
class TrainSection:
    """How much is trained."""

    per_device_train_batch_size: int = option(8, "Samples in one training micro-batch, per process.")
    num_train_epochs: float = option(
        3.0, "Passes over the training data; a fraction trains that part of the last pass. max_steps overrides it."
    )
    max_steps: int = option(
        -1,
        "Number of optimizer updates, whatever num_train_epochs says; the data is repeated as often as needed. "
        "-1: as many as num_train_epochs takes. Required for data without a length.",
    )


@dataclass(init=False, repr=False, eq=False)
class ScheduleSection:
    """The learning rate over time."""

    learning_rate: float = option(5e-5, "Peak learning rate: what the schedule multiplies.")
    lr_scheduler_type: SchedulerType | str = option(
        SchedulerType.LINEAR, "Shape of the learning rate after warmup, one of the names get_scheduler takes."
    )
    lr_scheduler_kwargs: dict[str, Any] | str | None = option(
        None, 'Further settings of the schedule, as a dict or as JSON, for instance {"num_cycles": 2}.'
    )
    warmup_steps: float = option(
        0, "Updates over which the learning rate rises from 0 to its peak; below 1, that share of all updates."
    )


@dataclass(init=False, repr=False, eq=False)
class OptimSection:
    """The optimizer."""

    optim: OptimizerNames | str = option(
        OptimizerNames.ADAMW_TORCH_FUSED,
        "Optimizer by name; 'auto' chooses one by device, dtype and memory and logs the reason.",
    )
    optim_args: str | None = option(None, "Further settings of the optimizer, as 'name=value,name=value'.")
    weight_decay: float = option(0.0, "Decoupled weight decay. Biases and the weights of norm layers are left out.")
    adam_beta1: float = option(0.9, "Decay of the running mean of gradients, for the Adam family.")
    adam_beta2: float = option(0.999, "Decay of the running mean of squared gradients, for the Adam family.")
    adam_epsilon: float = option(1e-8, "Term that keeps the Adam family's denominator away from zero.")
    optim_target_modules: None | str | list[str] = option(  # noqa: RUF036  transformers' parser takes the 2nd member.
        None,
        "Modules whose weights GaLore or APOLLO projects, or Muon gets: parts of names, one regex, or 'all-linear'.",
    )


@dataclass(init=False, repr=False, eq=False)
class UpdateSection:
    """What makes one update."""

    gradient_accumulation_steps: int = option(
        1, "Micro-batches whose gradients are added up before one update. Steps are counted in updates everywhere."
    )
    average_tokens_across_devices: bool = option(
        True, "Divide the loss by the count of targets over all processes, not by each process's own."
    )
    max_grad_norm: float = option(1.0, "Gradients with a larger L2 norm are scaled down to this norm. 0: no clipping.")
    label_smoothing_factor: float = option(
        0.0, "Share of the target probability that is spread evenly over all classes, from 0 to below 1."
    )


@dataclass(init=False, repr=False, eq=False)
class PrecisionSection:
    """Number formats."""

    bf16: bool = option(False, "Run forward and backward under bfloat16 autocast; weights stay as they are.")
    fp16: bool = option(False, "Run forward and backward under float16 autocast, with a gradient scaler.")
    bf16_full_eval: bool = option(False, "Cast the whole model to bfloat16 while evaluating and predicting.")
    fp16_full_eval: bool = option(False, "Cast the whole model to float16 while evaluating and predicting.")
    tf32: bool | None = option(None, "Allow (or forbid) TF32 matrix products on the GPU. Unset: as torch has it.")


@dataclass(init=False, repr=False, eq=False)
class ActivationSection:
    """Activations recomputed rather than kept."""

    activation_checkpointing: bool | None = option(
        None, "Recompute activations in the backward pass: far less memory, about a third more compute."
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = option(
        None,
        "Settings of activation checkpointing, as a dict or JSON: every_n_layers, offload (to host memory), and those "
        "of torch.utils.checkpoint such as use_reentrant.",
    )
    gradient_checkpointing: bool | None = option(None, "Older name of activation_checkpointing; both always agree.")
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = option(
        None, "Older name of activation_checkpointing_kwargs; both always agree."
    )


@dataclass(init=False, repr=False, eq=False)
class CompileSection:
    """Compilation and kernels."""

    torch_compile: bool = option(False, "Compile the model with torch.compile.")
    torch_compile_backend: str | None = option(
        None, "Backend of torch.compile; naming one turns torch_compile on. Unset: inductor."
    )
    torch_compile_mode: str | None = option(
        None, "Mode of torch.compile, such as 'reduce-overhead' or 'max-autotune'; naming one turns torch_compile on."
    )
    use_liger_kernel: bool = option(False, "Swap supported layers for the Liger kernels (package liger-kernel).")
    liger_kernel_config: dict[str, bool] | None = option(
        None, "Which Liger kernels to use: rope, cross_entropy, fused_linear_cross_entropy, rms_norm, swiglu."
    )


@dataclass(init=False, repr=False, eq=False)
class ModelSection:
    """Changes to the model and its use of memory during training."""

    use_cache: bool = option(False, "Let the model keep its key-value cache while training; rarely of use.")
    neftune_noise_alpha: float | None = option(
        None, "Scale of the uniform noise added to input embeddings in training (NEFTune, arXiv 2310.05914)."
    )
    torch_empty_cache_steps: int | None = option(
        None, "Return cached device memory every so many updates: lower peak memory, slower steps."
    )
    auto_find_batch_size: bool = option(
        False, "When memory runs out, halve the micro-batch and double the accumulation: the same global batch."
    )


@dataclass(init=False, repr=False, eq=False)
class LogSection:
    """What is logged, when and to whom."""

    logging_strategy: IntervalStrategy | str = option(
        IntervalStrategy.STEPS, "When training metrics are logged: 'no', 'steps' (every logging_steps), 'epoch'."
    )
    logging_steps: float = option(500, "Updates between two logs; below 1, that share of all updates.")
    logging_first_step: bool = option(False, "Log the first update too.")
    log_on_each_node: bool = option(True, "With several machines, log on each of them rather than on the first only.")
    logging_nan_inf_filter: bool = option(
        True, "Leave non-finite losses out of the logged mean and count them beside it. Gradients are not touched."
    )
    include_num_input_tokens_seen: str = option(
        "no", "Count the input tokens seen: 'all', 'non_padding', or 'no'. True means 'all', False 'no'."
    )
    log_level: str = option(
        "passive", "Level of the package's logger on the main process; 'passive' leaves it alone.", tuple(LOG_LEVELS)
    )
    log_level_replica: str = option(
        "warning", "Level of the package's logger on all other processes.", tuple(LOG_LEVELS)
    )
    disable_tqdm: bool | None = option(
        None, "Show no progress bars. Unset: shown, unless the package's logger is set above WARNING."
    )
    report_to: None | str | list[str] = option(  # noqa: RUF036  As above.
        "none", "Reporters that receive the logs: a name, a list of names, 'all' installed ones, or 'none'."
    )
    run_name: str | None = option(None, "Name of the run, for reporters.")
    project: str = option("huggingface", "Project of W&B, or experiment of MLflow, where the environment names none.")
    trackio_space_id: str | None = option(None, "Hub Space that the Trackio reporter syncs to.")
    trackio_bucket_id: str | None = option(None, "Hub bucket that the Trackio reporter stores its data in.")
    trackio_static_space_id: str | None = option(
        None, "Static hub Space that the Trackio reporter exports to at the end; False: none."
    )


@dataclass(init=False, repr=False, eq=False)
class EvalSection:
    """Evaluation during training."""

    eval_strategy: IntervalStrategy | str = option(
        IntervalStrategy.NO, "When the model is evaluated: 'no', 'steps' (every eval_steps), 'epoch'."
    )
    eval_steps: float | None = option(
        None, "Updates between two evaluations; below 1, that share of all updates. Unset: logging_steps."
    )
    eval_delay: float = option(0, "No evaluation before so many epochs (or updates, with eval_strategy='steps').")
    per_device_eval_batch_size: int = option(8, "Samples in one evaluation batch, per process.")
    prediction_loss_only: bool = option(False, "Evaluate and predict for the loss alone; nothing else is kept.")
    eval_on_start: bool = option(False, "Evaluate once before the first update.")
    eval_do_concat_batches: bool = option(
        True, "Join the predictions of all batches into one array each. False: a list with one entry per batch."
    )
    eval_use_gather_object: bool = option(
        False, "Gather evaluation results as Python objects, so that they need not be tensors."
    )
    eval_accumulation_steps: int | None = option(
        None, "Evaluation batches whose results stay on the device before they move to the host. Unset: 1."
    )


@dataclass(init=False, repr=False, eq=False)
class MetricSection:
    """What compute_metrics receives."""

    include_for_metrics: list[str] = option(
        list, "What compute_metrics gets beside predictions and labels: 'inputs', 'loss'.", METRIC_INPUTS
    )
    batch_eval_metrics: bool = option(
        False,
        "Call compute_metrics on each batch, given as tensors, and at the last one with compute_result=True: flat "
        "memory.",
    )


@dataclass(init=False, repr=False, eq=False)
class SaveSection:
    """Checkpoints."""

    save_only_model: bool = option(
        False, "Checkpoints hold the weights only: small, usable, but training cannot be resumed from them."
    )
    save_strategy: SaveStrategy | str = option(
        SaveStrategy.STEPS, "When a checkpoint is written: 'no', 'steps' (every save_steps), 'epoch', 'best'."
    )
    save_steps: float = option(500, "Updates between two checkpoints; below 1, that share of all updates.")
    save_on_each_node: bool = option(False, "With several machines, write on each: for disks that are not shared.")
    save_total_limit: int | None = option(
        None, "Checkpoints to keep; older ones are deleted, never the best nor the newest. Unset or 0: all."
    )
    enable_jit_checkpoint: bool = option(
        False,
        "Write a checkpoint when the process is told to end, also with save_strategy='no'. With any other it is "
        "written without this: see stop_signals.",
    )


@dataclass(init=False, repr=False, eq=False)
class HubSection:
    """The model hub."""

    push_to_hub: bool = option(False, "Push the model to the hub.")
    hub_token: str | None = option(
        None, "Token for the hub; without one, that of the hub's own login. It is never written to any file."
    )
    hub_private_repo: bool | None = option(None, "Create the hub repository as a private one.")
    hub_model_id: str | None = option(None, "Hub repository to push to, as 'name' or 'owner/name'.")
    hub_strategy: HubStrategy | str = option(
        HubStrategy.EVERY_SAVE, "What is pushed: 'end', 'every_save', 'checkpoint', 'all_checkpoints'."
    )
    hub_always_push: bool = option(
        False, "Push every checkpoint; else the newest takes the place of those that wait for a push."
    )
    hub_revision: str | None = option(None, "Branch of the hub repository to push to; made where it is not there.")


@dataclass(init=False, repr=False, eq=False)
class BestSection:
    """The best model."""

    load_best_model_at_end: bool = option(
        False, "After training, load the checkpoint with the best evaluation; it is never deleted meanwhile."
    )
    metric_for_best_model: str | None = option(
        None, "Evaluation metric that decides which model is best, with or without the prefix eval_. Unset: loss."
    )
    greater_is_better: bool | None = option(
        None, "Whether a larger metric is the better one. Unset: yes, unless the metric's name ends in 'loss'."
    )


@dataclass(init=False, repr=False, eq=False)
class ResumeSection:
    """Continuing a run."""

    ignore_data_skip: bool = option(
        False, "Start the data from its beginning on resume, rather than where the checkpoint left it."
    )
    restore_callback_states_from_checkpoint: bool = option(
        False, "Give callbacks the state they had in the checkpoint."
    )


@dataclass(init=False, repr=False, eq=False)
class SeedSection:
    """Randomness and the device."""

    full_determinism: bool = option(False, "Only deterministic kernels: the same bits each time, slower.")
    seed: int = option(42, "Seed of everything random in the run.")
    data_seed: int | None = option(None, "Seed of the order of the data. Unset: seed.")
    use_cpu: bool = option(False, "Train on the CPU, whatever accelerator there is.")


@dataclass(init=False, repr=False, eq=False)
class EngineSection:
    """Settings known from accelerate."""

    accelerator_config: dict[str, Any] | str | AcceleratorConfig | None = option(
        None, "Settings of the data-parallel loader under accelerate's names: a dict, JSON, or the path of a JSON file."
    )
    parallelism_config: dict[str, Any] | str | None = option(
        None,
        "Sizes of the axes of the mesh under accelerate's names (dp_shard_size, tp_size, ...): its ParallelismConfig, "
        "a dict, or JSON. See parallel.",
    )


@dataclass(init=False, repr=False, eq=False)
class DataSection:
    """How data is loaded."""

    dataloader_drop_last: bool = option(
        False, "Leave out a last training batch that is not full; evaluation takes every sample."
    )
    dataloader_num_workers: int = option(0, "Worker processes that load data; 0: the main process does.")
    dataloader_pin_memory: bool = option(True, "Page-lock the host memory of batches, for faster copies to a GPU.")
    dataloader_persistent_workers: bool = option(False, "Keep the worker processes alive from epoch to epoch.")
    dataloader_prefetch_factor: int | None = option(None, "Batches that each worker holds ready. Unset: as torch does.")
    dataloader_multiprocessing_context: str | None = option(
        None, "How worker processes are started. Unset: as Python does on this system.", START_METHODS
    )
    dataloader_in_order: bool = option(
        True, "Take batches in the order the workers were asked for them. False: as soon as one is ready."
    )
    remove_unused_columns: bool = option(
        True, "Drop the columns of a dataset that the model's forward takes no argument for."
    )
    label_names: list[str] | None = option(
        None, "Keys of the inputs that are labels. Unset: found in the signature of the model's forward."
    )
    train_sampling_strategy: str = option(
        "random",
        "Order of the training samples: shuffled, as they come, in batches of like length, or with the padded cost "
        "balanced over the micro-batches of an update.",
        SAMPLING_STRATEGIES,
    )
    length_column_name: str = option("length", "Column with the length of each sample, for the sampling by length.")


@dataclass(init=False, repr=False, eq=False)
class ParallelSection:
    """Several processes."""

    ddp_find_unused_parameters: bool | None = option(
        None, "DistributedDataParallel's find_unused_parameters. Unset: chosen from the model."
    )
    ddp_bucket_cap_mb: int | None = option(None, "DistributedDataParallel's bucket size, in MB.")
    ddp_broadcast_buffers: bool | None = option(None, "DistributedDataParallel's broadcast_buffers.")
    ddp_static_graph: bool | None = option(None, "DistributedDataParallel's static_graph.")
    ddp_backend: str | None = option(None, "Backend of the process group. Unset: chosen by device.", BACKENDS)
    ddp_timeout: int = option(1800, "Seconds after which a collective operation counts as hung.")
    fsdp: str | None = option(None, "Shard the model over processes (fully_shard): True, or the older option words.")
    fsdp_config: dict[str, Any] | str | None = option(
        None, "Settings of the sharding: a dict, JSON, or the path of a JSON file."
    )
    deepspeed: dict[str, Any] | str | None = option(
        None, "DeepSpeed's configuration: a dict, JSON, or the path of a JSON file."
    )


@dataclass(init=False, repr=False, eq=False)
class DebugSection:
    """Diagnoses."""

    debug: str | list[DebugOption] = option(
        "",
        "Diagnoses to run, separated by spaces: underflow_overflow (infinities and NaN in any module), "
        "tpu_metrics_debug (what torch_xla counted, printed at the end of each epoch).",
    )
    skip_memory_metrics: bool = option(
        True, "Leave the memory use of each stage (init, train, eval, test) out of the metrics."
    )


@dataclass(init=False, repr=False, eq=False)
class ScriptSection:
    """Flags for scripts. The trainer reads resume_from_checkpoint only."""

    do_train: bool = option(False, "For your script: whether to train.")
    do_eval: bool = option(False, "For your script: whether to evaluate. Set where eval_strategy is not 'no'.")
    do_predict: bool = option(False, "For your script: whether to predict on the test set.")
    resume_from_checkpoint: str | None = option(
        None, "Checkpoint that train() goes on from where its own argument names none: a folder, or 'true': the newest."
    )
    local_rank: int = option(-1, "Given by older launchers; the environment's LOCAL_RANK is what counts.")


@dataclass(init=False, repr=False, eq=False)
class PacelineSection:
    """Options of paceline's own."""

    loss_weight: str | None = option(
        None,
        "What a loss that the model returns is a mean over: its samples, its tokens, its tokens after the shift by "
        "one; or 'scaled': already divided for the whole update. Unset: identified on the first batches.",
        LOSS_WEIGHTS,
    )
    nonfinite_policy: str = option(
        "warn",
        "On a loss or gradient that is not finite: 'warn'; 'skip' the update, while the schedule of the learning rate "
        "goes on (not so with fp16); 'raise'; or 'rollback' to the last good state, leaving the offending samples out. "
        "Looked at when the numbers are read: at each log, evaluation, save.",
        ("warn", "skip", "raise", "rollback"),
    )
    save_in_background: bool = option(
        True,
        "Copy a checkpoint to host memory and write it while training goes on. Training waits all the same where "
        "something needs the files at once (a callback's on_save, an own _save), or memory is short; the log says so.",
    )
    checkpoint_format: str | None = option(
        None,
        "'full': the first process writes the whole model; 'sharded': each writes its part, which any number of "
        "processes can load and `paceline export` makes one model of. Unset: as state_dict_type in fsdp_config, or "
        "'full'.",
        ("full", "sharded"),
    )
    output_store: str | None = option(
        None,
        "URL of an object store that the output folder is copied to behind the training, checkpoints complete or not "
        "at all, and that a run is gone on from where the folder is lost. Unset: output_dir, where that is a URL.",
    )
    keep_best: int = option(
        0, "Checkpoints to keep for their evaluation, the best so many, beside those of the other keep_ options."
    )
    keep_best_metric: str | None = option(
        None,
        "The evaluation metric that keep_best goes by, larger is better unless it ends in 'loss'. Unset: "
        "metric_for_best_model.",
    )
    keep_every_steps: int = option(0, "Keep each checkpoint at a multiple of so many updates. 0: none for that reason.")
    keep_every_hours: float = option(
        0.0, "Keep the first checkpoint, and one for each so many hours after it. 0: none for that reason."
    )
    stop_signals: bool = option(
        True, "On SIGTERM, SIGUSR1 or Ctrl-C, finish the update, write a checkpoint and leave train()."
    )
    compile_regions: bool = option(
        False, "With torch_compile, compile each repeated block on its own: much shorter compilation."
    )
    eval_spill_gb: float = option(
        0.25,
        "Predictions that an evaluation keeps for the end are held in memory up to so many GB, and past them in a "
        "temporary file. 'inf': always in memory.",
    )
    half_precision_backend: str = option(
        "auto",
        "What runs fp16=True: torch's autocast ('auto', 'amp'), or NVIDIA's Apex ('apex'), for scripts written for it.",
        PRECISION_BACKENDS,
    )
    fp16_opt_level: str = option("O1", "With half_precision_backend='apex': the level of apex.amp.", APEX_LEVELS)
    parallel: dict[str, int] | str | None = option(
        None,
        "How several processes share the work: 'ddp', each with the whole model; 'fsdp', each with a shard of it; or "
        "sizes of a mesh, as a dict or as 'dp_shard=2,tp=2': dp_replicate, dp_shard, cp or sp (parts of each sequence: "
        "keys and values gathered, or heads exchanged), tp (parts of the matrices), pp (stages of a pipeline); -1 for "
        "all processes that the others leave. Unset: 'ddp', or 'fsdp' where fsdp is set. Processes are started by "
        "`paceline launch`, torchrun, accelerate launch or srun. 'xla': one process, on XLA devices (torch_xla).",
    )
    pipeline_config: dict[str, Any] | str | None = option(
        None,
        "How a pipeline runs: schedule ('1f1b', 'gpipe' or 'interleaved_1f1b'), stages_per_process, micro_batches (of "
        "an update, at least). A dict or JSON. Unset: 1f1b, one stage on each process, at least as many micro-batches "
        "as stages.",
    )
    tp_plan: dict[str, Any] | str | None = option(
        None,
        "Which modules are cut over the axis tp of the mesh, and how: names, '*' for one part of a name, to styles "
        "('colwise', 'rowwise', ...). A dict, JSON, or the path of a JSON file. Unset: the model's own plan.",
    )
    ddp_comm_hook: str | None = option(
        None, "Exchange gradients in 16 bits: 'fp16' or 'bf16'. Unset: in the type they have.", ("fp16", "bf16")
    )
    tpu_num_cores: int | None = option(
        None,
        "XLA devices to use, one or all: all take a part of each batch, with the whole model on each. Unset: one, or "
        "all where fsdp_config shards the model over them.",
    )
    logging_dir: str | None = option(
        None, "Folder of the TensorBoard files. Unset: TENSORBOARD_LOGGING_DIR, else output_dir/runs/<date>_<host>."
    )


@dataclass
class Options(
    # Dataclass fields are collected from the last base to the first: read this list from below.
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
    """All sections under flat names, in the order of `RunSection` to `PacelineSection`."""
