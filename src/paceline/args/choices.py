"""Enumerations of option values. A member equals its plain string: `args.eval_strategy == "steps"` holds."""

from __future__ import annotations

import logging
from enum import Enum, StrEnum


class IntervalStrategy(StrEnum):
    """Interval of a recurring action: never, every N optimizer steps, or at the end of each epoch."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"


class SaveStrategy(StrEnum):
    """Interval of checkpoints; `best` writes one whenever an evaluation beats all earlier ones."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"
    BEST = "best"


class HPSearchBackend(StrEnum):
    """Backends of `hyperparameter_search`."""

    OPTUNA = "optuna"
    RAY = "ray"
    WANDB = "wandb"
    MEMBERS = "members"


class HubStrategy(StrEnum):
    """Content and interval of pushes to the hub."""

    END = "end"
    EVERY_SAVE = "every_save"
    CHECKPOINT = "checkpoint"
    ALL_CHECKPOINTS = "all_checkpoints"


class SchedulerType(StrEnum):
    """Learning-rate schedules, as `get_scheduler` names them."""

    LINEAR = "linear"
    COSINE = "cosine"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"
    POLYNOMIAL = "polynomial"
    CONSTANT = "constant"
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    INVERSE_SQRT = "inverse_sqrt"
    REDUCE_ON_PLATEAU = "reduce_lr_on_plateau"
    COSINE_WITH_MIN_LR = "cosine_with_min_lr"
    COSINE_WARMUP_WITH_MIN_LR = "cosine_warmup_with_min_lr"
    WARMUP_STABLE_DECAY = "warmup_stable_decay"
    GREEDY = "greedy"


class OptimizerNames(StrEnum):
    """Optimizers by name. `auto` chooses by device, dtype and memory and logs the reason."""

    AUTO = "auto"
    ADAMW_TORCH = "adamw_torch"
    ADAMW_TORCH_FUSED = "adamw_torch_fused"
    ADAMW_TORCH_XLA = "adamw_torch_xla"
    ADAMW_TORCH_NPU_FUSED = "adamw_torch_npu_fused"
    ADAMW_APEX_FUSED = "adamw_apex_fused"
    ADAM = "adam"
    NADAM = "nadam"
    RADAM = "radam"
    MUON = "muon"
    ADAFACTOR = "adafactor"
    ADAMW_ANYPRECISION = "adamw_anyprecision"
    ADAMW_TORCH_4BIT = "adamw_torch_4bit"
    ADAMW_TORCH_8BIT = "adamw_torch_8bit"
    ADEMAMIX = "ademamix"
    SGD = "sgd"
    ADAGRAD = "adagrad"
    ADAMW_BNB = "adamw_bnb_8bit"
    ADAMW_8BIT = "adamw_8bit"
    ADEMAMIX_8BIT = "ademamix_8bit"
    LION_8BIT = "lion_8bit"
    LION = "lion_32bit"
    PAGED_ADAMW = "paged_adamw_32bit"
    PAGED_ADAMW_8BIT = "paged_adamw_8bit"
    PAGED_ADEMAMIX = "paged_ademamix_32bit"
    PAGED_ADEMAMIX_8BIT = "paged_ademamix_8bit"
    PAGED_LION = "paged_lion_32bit"
    PAGED_LION_8BIT = "paged_lion_8bit"
    RMSPROP = "rmsprop"
    RMSPROP_BNB = "rmsprop_bnb"
    RMSPROP_8BIT = "rmsprop_bnb_8bit"
    RMSPROP_32BIT = "rmsprop_bnb_32bit"
    GALORE_ADAMW = "galore_adamw"
    GALORE_ADAMW_8BIT = "galore_adamw_8bit"
    GALORE_ADAFACTOR = "galore_adafactor"
    GALORE_ADAMW_LAYERWISE = "galore_adamw_layerwise"
    GALORE_ADAMW_8BIT_LAYERWISE = "galore_adamw_8bit_layerwise"
    GALORE_ADAFACTOR_LAYERWISE = "galore_adafactor_layerwise"
    LOMO = "lomo"
    ADALOMO = "adalomo"
    GROKADAMW = "grokadamw"
    SCHEDULE_FREE_RADAM = "schedule_free_radam"
    SCHEDULE_FREE_ADAMW = "schedule_free_adamw"
    SCHEDULE_FREE_SGD = "schedule_free_sgd"
    APOLLO_ADAMW = "apollo_adamw"
    APOLLO_ADAMW_LAYERWISE = "apollo_adamw_layerwise"
    STABLE_ADAMW = "stable_adamw"


class DebugOption(StrEnum):
    """Diagnostics of the option `debug`."""

    UNDERFLOW_OVERFLOW = "underflow_overflow"
    TPU_METRICS_DEBUG = "tpu_metrics_debug"


class ParallelMode(Enum):
    """Parallelism of a run, as transformers names it."""

    NOT_PARALLEL = "not_parallel"
    NOT_DISTRIBUTED = "not_distributed"
    DISTRIBUTED = "distributed"
    SAGEMAKER_MODEL_PARALLEL = "sagemaker_model_parallel"
    SAGEMAKER_DATA_PARALLEL = "sagemaker_data_parallel"
    TPU = "tpu"


LOG_LEVELS = {
    "detail": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "passive": -1,
}
PACKINGS = ("pack", "flatten", "group")
TOKEN_COUNTS = ("no", "all", "non_padding")
METRIC_INPUTS = ("inputs", "loss")
PRECISION_BACKENDS = ("auto", "amp", "cuda_amp", "cpu_amp", "apex")
APEX_LEVELS = ("O0", "O1", "O2", "O3")
LOSS_WEIGHTS = ("samples", "tokens", "shifted_tokens", "scaled", "sum")
BACKENDS = ("nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl")
START_METHODS = ("fork", "spawn", "forkserver")
STATE_DTYPES = ("float32", "bfloat16")
AVERAGE_DEVICES = ("model", "cpu")
LAYER_LOSSES = ("mse", "cosine")
