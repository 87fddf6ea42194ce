"""paceline: trains any PyTorch module. Names are loaded at first use: importing the package loads no torch."""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.args.accelerator_config import AcceleratorConfig
    from paceline.args.choices import (
        DebugOption,
        HubStrategy,
        IntervalStrategy,
        OptimizerNames,
        ParallelMode,
        SaveStrategy,
        SchedulerType,
    )
    from paceline.args.parser import HfArg, HfArgumentParser
    from paceline.args.plan import Plan, UnsupportedOption
    from paceline.args.seq2seq import Seq2SeqTrainingArguments
    from paceline.args.training import TrainingArguments
    from paceline.callbacks.early_stopping import EarlyStoppingCallback
    from paceline.callbacks.flow import DefaultFlowCallback
    from paceline.callbacks.jit_checkpoint import JITCheckpointCallback
    from paceline.callbacks.notebook import NotebookProgressCallback
    from paceline.callbacks.printer import PrinterCallback
    from paceline.callbacks.progress import ProgressCallback
    from paceline.callbacks.reporters.mlflow import MLflowCallback
    from paceline.callbacks.reporters.tensorboard import TensorBoardCallback
    from paceline.callbacks.reporters.wandb import WandbCallback
    from paceline.core.events import CallbackHandler, TrainerCallback
    from paceline.core.folders import get_last_checkpoint, rotate_checkpoints, sort_checkpoints
    from paceline.core.metrics import default_compute_objective, speed_metrics
    from paceline.core.outputs import BestRun, EvalLoopOutput, EvalPrediction, PredictionOutput, TrainOutput
    from paceline.core.state import ExportableState, TrainerControl, TrainerState
    from paceline.core.streaming import StreamingMetric
    from paceline.data.collate_classification import DataCollatorForMultipleChoice, DataCollatorForTokenClassification
    from paceline.data.collate_flat import DataCollatorWithFlattening
    from paceline.data.collate_language import (
        DataCollatorForLanguageModeling,
        DataCollatorForPermutationLanguageModeling,
        DataCollatorForSOP,
        DataCollatorForWholeWordMask,
    )
    from paceline.data.collate_seq2seq import DataCollatorForSeq2Seq
    from paceline.data.collators import DataCollatorWithPadding, DefaultDataCollator, default_data_collator
    from paceline.data.samplers import (
        BatchRebalanceSampler,
        DistributedLengthGroupedSampler,
        DistributedSamplerWithLoop,
        IterableDatasetShard,
        LengthGroupedSampler,
        ShardSampler,
        get_length_grouped_indices,
    )
    from paceline.data.shuffle import ShuffleBuffer
    from paceline.distributed.batch_size import find_executable_batch_size
    from paceline.distributed.random import enable_full_determinism, set_seed
    from paceline.model.check_targets import check_targets
    from paceline.model.loss import LabelSmoother
    from paceline.model.overflow import DebugUnderflowOverflow
    from paceline.optim.adafactor import Adafactor, AdafactorSchedule
    from paceline.optim.greedy import GreedyLR
    from paceline.optim.schedulers import (
        get_adafactor_schedule,
        get_constant_schedule,
        get_constant_schedule_with_warmup,
        get_cosine_schedule_with_warmup,
        get_cosine_with_hard_restarts_schedule_with_warmup,
        get_cosine_with_min_lr_schedule_with_warmup,
        get_cosine_with_min_lr_schedule_with_warmup_lr_rate,
        get_greedy_schedule,
        get_inverse_sqrt_schedule,
        get_linear_schedule_with_warmup,
        get_polynomial_decay_schedule_with_warmup,
        get_reduce_on_plateau_schedule,
        get_scheduler,
        get_wsd_schedule,
    )
    from paceline.replaying import replay
    from paceline.seq2seq import Seq2SeqTrainer
    from paceline.trainer import Trainer

__version__ = "0.1.0"

# public name -> the module that defines it
_HOMES = {
    "AcceleratorConfig": "paceline.args.accelerator_config",
    "Adafactor": "paceline.optim.adafactor",
    "AdafactorSchedule": "paceline.optim.adafactor",
    "BatchRebalanceSampler": "paceline.data.samplers",
    "BestRun": "paceline.core.outputs",
    "CallbackHandler": "paceline.core.events",
    "DataCollatorForLanguageModeling": "paceline.data.collate_language",
    "DataCollatorForMultipleChoice": "paceline.data.collate_classification",
    "DataCollatorForPermutationLanguageModeling": "paceline.data.collate_language",
    "DataCollatorForSOP": "paceline.data.collate_language",
    "DataCollatorForSeq2Seq": "paceline.data.collate_seq2seq",
    "DataCollatorForTokenClassification": "paceline.data.collate_classification",
    "DataCollatorForWholeWordMask": "paceline.data.collate_language",
    "DataCollatorWithFlattening": "paceline.data.collate_flat",
    "DataCollatorWithPadding": "paceline.data.collators",
    "DebugOption": "paceline.args.choices",
    "DebugUnderflowOverflow": "paceline.model.overflow",
    "DefaultDataCollator": "paceline.data.collators",
    "DefaultFlowCallback": "paceline.callbacks.flow",
    "DistributedLengthGroupedSampler": "paceline.data.samplers",
    "DistributedSamplerWithLoop": "paceline.data.samplers",
    "EarlyStoppingCallback": "paceline.callbacks.early_stopping",
    "EvalLoopOutput": "paceline.core.outputs",
    "EvalPrediction": "paceline.core.outputs",
    "ExportableState": "paceline.core.state",
    "GreedyLR": "paceline.optim.greedy",
    "HfArg": "paceline.args.parser",
    "HfArgumentParser": "paceline.args.parser",
    "HubStrategy": "paceline.args.choices",
    "IntervalStrategy": "paceline.args.choices",
    "IterableDatasetShard": "paceline.data.samplers",
    "JITCheckpointCallback": "paceline.callbacks.jit_checkpoint",
    "LabelSmoother": "paceline.model.loss",
    "LengthGroupedSampler": "paceline.data.samplers",
    "MLflowCallback": "paceline.callbacks.reporters.mlflow",
    "NotebookProgressCallback": "paceline.callbacks.notebook",
    "OptimizerNames": "paceline.args.choices",
    "ParallelMode": "paceline.args.choices",
    "Plan": "paceline.args.plan",
    "PredictionOutput": "paceline.core.outputs",
    "PrinterCallback": "paceline.callbacks.printer",
    "ProgressCallback": "paceline.callbacks.progress",
    "SaveStrategy": "paceline.args.choices",
    "SchedulerType": "paceline.args.choices",
    "Seq2SeqTrainer": "paceline.seq2seq",
    "Seq2SeqTrainingArguments": "paceline.args.seq2seq",
    "ShardSampler": "paceline.data.samplers",
    "ShuffleBuffer": "paceline.data.shuffle",
    "StreamingMetric": "paceline.core.streaming",
    "TensorBoardCallback": "paceline.callbacks.reporters.tensorboard",
    "TrainOutput": "paceline.core.outputs",
    "Trainer": "paceline.trainer",
    "TrainerCallback": "paceline.core.events",
    "TrainerControl": "paceline.core.state",
    "TrainerState": "paceline.core.state",
    "TrainingArguments": "paceline.args.training",
    "UnsupportedOption": "paceline.args.plan",
    "WandbCallback": "paceline.callbacks.reporters.wandb",
    "check_targets": "paceline.model.check_targets",
    "default_compute_objective": "paceline.core.metrics",
    "default_data_collator": "paceline.data.collators",
    "enable_full_determinism": "paceline.distributed.random",
    "find_executable_batch_size": "paceline.distributed.batch_size",
    "get_adafactor_schedule": "paceline.optim.schedulers",
    "get_constant_schedule": "paceline.optim.schedulers",
    "get_constant_schedule_with_warmup": "paceline.optim.schedulers",
    "get_cosine_schedule_with_warmup": "paceline.optim.schedulers",
    "get_cosine_with_hard_restarts_schedule_with_warmup": "paceline.optim.schedulers",
    "get_cosine_with_min_lr_schedule_with_warmup": "paceline.optim.schedulers",
    "get_cosine_with_min_lr_schedule_with_warmup_lr_rate": "paceline.optim.schedulers",
    "get_greedy_schedule": "paceline.optim.schedulers",
    "get_inverse_sqrt_schedule": "paceline.optim.schedulers",
    "get_last_checkpoint": "paceline.core.folders",
    "get_length_grouped_indices": "paceline.data.samplers",
    "get_linear_schedule_with_warmup": "paceline.optim.schedulers",
    "get_polynomial_decay_schedule_with_warmup": "paceline.optim.schedulers",
    "get_reduce_on_plateau_schedule": "paceline.optim.schedulers",
    "get_scheduler": "paceline.optim.schedulers",
    "get_wsd_schedule": "paceline.optim.schedulers",
    "replay": "paceline.replaying",
    "rotate_checkpoints": "paceline.core.folders",
    "set_seed": "paceline.distributed.random",
    "sort_checkpoints": "paceline.core.folders",
    "speed_metrics": "paceline.core.metrics",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "drop_in":
        return importlib.import_module("paceline.drop_in")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    # a collection in the middle goes through all of torch's objects, half of the time that the import takes
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        value = getattr(importlib.import_module(home), name)
    finally:
        if was_enabled:
            gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
