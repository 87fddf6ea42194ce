"""paceline: trains any PyTorch module. Names are imported on first use: importing the package does not import torch."""

from __future__ import annotations

import gc
import importlib
import os
from typing import TYPE_CHECKING, Any

from paceline.args.secrets import mask_logs

if TYPE_CHECKING:
    # `as`: type checkers take it for a name that users may import. One import per module, which isort would split.
    # isort: off
    from paceline.args.accelerator_config import AcceleratorConfig as AcceleratorConfig
    from paceline.args.choices import (
        DebugOption as DebugOption,
        HPSearchBackend as HPSearchBackend,
        HubStrategy as HubStrategy,
        IntervalStrategy as IntervalStrategy,
        OptimizerNames as OptimizerNames,
        ParallelMode as ParallelMode,
        SaveStrategy as SaveStrategy,
        SchedulerType as SchedulerType,
    )
    from paceline.args.members import Member as Member
    from paceline.args.parser import HfArg as HfArg, HfArgumentParser as HfArgumentParser
    from paceline.args.plan import Plan as Plan, UnsupportedOption as UnsupportedOption
    from paceline.args.regularizers import (
        DPSGD as DPSGD,
        SAM as SAM,
        CutMix as CutMix,
        Mixup as Mixup,
        Regularizer as Regularizer,
    )
    from paceline.args.phases import Phase as Phase
    from paceline.args.seq2seq import Seq2SeqTrainingArguments as Seq2SeqTrainingArguments
    from paceline.args.training import TrainingArguments as TrainingArguments
    from paceline.callbacks.early_stopping import EarlyStoppingCallback as EarlyStoppingCallback
    from paceline.callbacks.flow import DefaultFlowCallback as DefaultFlowCallback
    from paceline.callbacks.jit_checkpoint import JITCheckpointCallback as JITCheckpointCallback
    from paceline.callbacks.notebook import NotebookProgressCallback as NotebookProgressCallback
    from paceline.callbacks.printer import PrinterCallback as PrinterCallback
    from paceline.callbacks.progress import ProgressCallback as ProgressCallback
    from paceline.callbacks.report import ReportCallback as ReportCallback
    from paceline.callbacks.reporters.azure_ml import AzureMLCallback as AzureMLCallback
    from paceline.callbacks.reporters.clearml import ClearMLCallback as ClearMLCallback
    from paceline.callbacks.reporters.codecarbon import CodeCarbonCallback as CodeCarbonCallback
    from paceline.callbacks.reporters.comet import CometCallback as CometCallback
    from paceline.callbacks.reporters.dagshub import DagsHubCallback as DagsHubCallback
    from paceline.callbacks.reporters.dvclive import DVCLiveCallback as DVCLiveCallback
    from paceline.callbacks.reporters.flyte import FlyteCallback as FlyteCallback
    from paceline.callbacks.reporters.kubeflow import KubeflowCallback as KubeflowCallback
    from paceline.callbacks.reporters.mlflow import MLflowCallback as MLflowCallback
    from paceline.callbacks.reporters.neptune import NeptuneCallback as NeptuneCallback
    from paceline.callbacks.reporters.swanlab import SwanLabCallback as SwanLabCallback
    from paceline.callbacks.reporters.tensorboard import TensorBoardCallback as TensorBoardCallback
    from paceline.callbacks.reporters.trackio import TrackioCallback as TrackioCallback
    from paceline.callbacks.reporters.wandb import WandbCallback as WandbCallback
    from paceline.checkpoint.folders import (
        get_last_checkpoint as get_last_checkpoint,
        rotate_checkpoints as rotate_checkpoints,
        sort_checkpoints as sort_checkpoints,
    )
    from paceline.core.contracts import StreamingMetric as StreamingMetric
    from paceline.core.events import CallbackHandler as CallbackHandler, TrainerCallback as TrainerCallback
    from paceline.core.metrics import (
        default_compute_objective as default_compute_objective,
        speed_metrics as speed_metrics,
    )
    from paceline.core.outputs import (
        BestRun as BestRun,
        EvalLoopOutput as EvalLoopOutput,
        EvalPrediction as EvalPrediction,
        PredictionOutput as PredictionOutput,
        TrainOutput as TrainOutput,
    )
    from paceline.core.state import (
        ExportableState as ExportableState,
        TrainerControl as TrainerControl,
        TrainerState as TrainerState,
    )
    from paceline.pytorch.data.collate_classification import (
        DataCollatorForMultipleChoice as DataCollatorForMultipleChoice,
        DataCollatorForTokenClassification as DataCollatorForTokenClassification,
    )
    from paceline.pytorch.data.collate_flat import DataCollatorWithFlattening as DataCollatorWithFlattening
    from paceline.pytorch.data.collate_language import (
        DataCollatorForLanguageModeling as DataCollatorForLanguageModeling,
        DataCollatorForPermutationLanguageModeling as DataCollatorForPermutationLanguageModeling,
        DataCollatorForSOP as DataCollatorForSOP,
        DataCollatorForWholeWordMask as DataCollatorForWholeWordMask,
    )
    from paceline.pytorch.data.collate_seq2seq import DataCollatorForSeq2Seq as DataCollatorForSeq2Seq
    from paceline.pytorch.data.collators import (
        DataCollatorMixin as DataCollatorMixin,
        DataCollatorWithPadding as DataCollatorWithPadding,
        DefaultDataCollator as DefaultDataCollator,
        default_data_collator as default_data_collator,
    )
    from paceline.pytorch.data.samplers import (
        BatchRebalanceSampler as BatchRebalanceSampler,
        DistributedLengthGroupedSampler as DistributedLengthGroupedSampler,
        DistributedSamplerWithLoop as DistributedSamplerWithLoop,
        IterableDatasetShard as IterableDatasetShard,
        LengthGroupedSampler as LengthGroupedSampler,
        ShardSampler as ShardSampler,
        get_length_grouped_indices as get_length_grouped_indices,
    )
    from paceline.pytorch.data.mixing import MixedDataset as MixedDataset, MixedStream as MixedStream
    from paceline.pytorch.data.shuffle import ShuffleBuffer as ShuffleBuffer
    from paceline.pytorch.distributed.batch_size import find_executable_batch_size as find_executable_batch_size
    from paceline.pytorch.distributed.random import (
        enable_full_determinism as enable_full_determinism,
        set_seed as set_seed,
    )
    from paceline.pytorch.distributed.simulated import simulated_processes as simulated_processes
    from paceline.predictions.ensemble import ensemble_predict as ensemble_predict
    from paceline.pytorch.members.trainer import MembersTrainer as MembersTrainer
    from paceline.predictions.augmentation import TestTimeAugmentation as TestTimeAugmentation
    from paceline.pytorch.evaluation.harness import EvaluationHarness as EvaluationHarness
    from paceline.pytorch.evaluation.samples import EvaluationSamples as EvaluationSamples
    from paceline.pytorch.evaluation.samples import EvaluationTools as EvaluationTools
    from paceline.pytorch.model.check_targets import check_targets as check_targets
    from paceline.pytorch.model.loss import LabelSmoother as LabelSmoother
    from paceline.pytorch.model.overflow import DebugUnderflowOverflow as DebugUnderflowOverflow
    from paceline.pytorch.optim.adafactor import Adafactor as Adafactor, AdafactorSchedule as AdafactorSchedule
    from paceline.pytorch.optim.greedy import GreedyLR as GreedyLR
    from paceline.pytorch.optim.schedulers import (
        get_adafactor_schedule as get_adafactor_schedule,
        get_constant_schedule as get_constant_schedule,
        get_constant_schedule_with_warmup as get_constant_schedule_with_warmup,
        get_cosine_schedule_with_warmup as get_cosine_schedule_with_warmup,
        get_cosine_with_hard_restarts_schedule_with_warmup as get_cosine_with_hard_restarts_schedule_with_warmup,
        get_cosine_with_min_lr_schedule_with_warmup as get_cosine_with_min_lr_schedule_with_warmup,
        get_cosine_with_min_lr_schedule_with_warmup_lr_rate as get_cosine_with_min_lr_schedule_with_warmup_lr_rate,
        get_greedy_schedule as get_greedy_schedule,
        get_inverse_sqrt_schedule as get_inverse_sqrt_schedule,
        get_linear_schedule_with_warmup as get_linear_schedule_with_warmup,
        get_polynomial_decay_schedule_with_warmup as get_polynomial_decay_schedule_with_warmup,
        get_reduce_on_plateau_schedule as get_reduce_on_plateau_schedule,
        get_scheduler as get_scheduler,
        get_wsd_schedule as get_wsd_schedule,
    )
    from paceline.pytorch.pruning.callback import Pruning as Pruning
    from paceline.pytorch.replay.step import replay as replay
    from paceline.pytorch.ensembles.snapshots import SnapshotEnsemble as SnapshotEnsemble
    from paceline.pytorch.seq2seq import Seq2SeqTrainer as Seq2SeqTrainer
    from paceline.pytorch.trainer import Trainer as Trainer
    from paceline.search.spaces import (
        default_hp_space_optuna as default_hp_space_optuna,
        default_hp_space_ray as default_hp_space_ray,
        default_hp_space_wandb as default_hp_space_wandb,
    )
    from paceline.tensorflow.arguments import TFTrainingArguments as TFTrainingArguments
    from paceline.tensorflow.keras_callbacks import (
        KerasMetricCallback as KerasMetricCallback,
        PushToHubCallback as PushToHubCallback,
    )
    from paceline.tensorflow.optim.optimizers import (
        AdamWeightDecay as AdamWeightDecay,
        GradientAccumulator as GradientAccumulator,
        create_optimizer as create_optimizer,
    )
    from paceline.tensorflow.optim.schedules import WarmUp as WarmUp
    from paceline.tensorflow.trainer import TFTrainer as TFTrainer
    # isort: on

__version__ = "0.1.0"

# public name -> its module
_HOMES = {
    "AcceleratorConfig": "paceline.args.accelerator_config",
    "Adafactor": "paceline.pytorch.optim.adafactor",
    "AdafactorSchedule": "paceline.pytorch.optim.adafactor",
    "AdamWeightDecay": "paceline.tensorflow.optim.optimizers",
    "AzureMLCallback": "paceline.callbacks.reporters.azure_ml",
    "BatchRebalanceSampler": "paceline.pytorch.data.samplers",
    "BestRun": "paceline.core.outputs",
    "CallbackHandler": "paceline.core.events",
    "ClearMLCallback": "paceline.callbacks.reporters.clearml",
    "CodeCarbonCallback": "paceline.callbacks.reporters.codecarbon",
    "CometCallback": "paceline.callbacks.reporters.comet",
    "CutMix": "paceline.args.regularizers",
    "DPSGD": "paceline.args.regularizers",
    "DVCLiveCallback": "paceline.callbacks.reporters.dvclive",
    "DagsHubCallback": "paceline.callbacks.reporters.dagshub",
    "DataCollatorForLanguageModeling": "paceline.pytorch.data.collate_language",
    "DataCollatorForMultipleChoice": "paceline.pytorch.data.collate_classification",
    "DataCollatorForPermutationLanguageModeling": "paceline.pytorch.data.collate_language",
    "DataCollatorForSOP": "paceline.pytorch.data.collate_language",
    "DataCollatorForSeq2Seq": "paceline.pytorch.data.collate_seq2seq",
    "DataCollatorForTokenClassification": "paceline.pytorch.data.collate_classification",
    "DataCollatorForWholeWordMask": "paceline.pytorch.data.collate_language",
    "DataCollatorMixin": "paceline.pytorch.data.collators",
    "DataCollatorWithFlattening": "paceline.pytorch.data.collate_flat",
    "DataCollatorWithPadding": "paceline.pytorch.data.collators",
    "DebugOption": "paceline.args.choices",
    "DebugUnderflowOverflow": "paceline.pytorch.model.overflow",
    "DefaultDataCollator": "paceline.pytorch.data.collators",
    "DefaultFlowCallback": "paceline.callbacks.flow",
    "DistributedLengthGroupedSampler": "paceline.pytorch.data.samplers",
    "DistributedSamplerWithLoop": "paceline.pytorch.data.samplers",
    "EarlyStoppingCallback": "paceline.callbacks.early_stopping",
    "EvalLoopOutput": "paceline.core.outputs",
    "EvalPrediction": "paceline.core.outputs",
    "EvaluationHarness": "paceline.pytorch.evaluation.harness",
    "EvaluationSamples": "paceline.pytorch.evaluation.samples",
    "EvaluationTools": "paceline.pytorch.evaluation.samples",
    "ExportableState": "paceline.core.state",
    "FlyteCallback": "paceline.callbacks.reporters.flyte",
    "GradientAccumulator": "paceline.tensorflow.optim.optimizers",
    "GreedyLR": "paceline.pytorch.optim.greedy",
    "HPSearchBackend": "paceline.args.choices",
    "HfArg": "paceline.args.parser",
    "HfArgumentParser": "paceline.args.parser",
    "HubStrategy": "paceline.args.choices",
    "IntervalStrategy": "paceline.args.choices",
    "IterableDatasetShard": "paceline.pytorch.data.samplers",
    "KerasMetricCallback": "paceline.tensorflow.keras_callbacks",
    "JITCheckpointCallback": "paceline.callbacks.jit_checkpoint",
    "KubeflowCallback": "paceline.callbacks.reporters.kubeflow",
    "LabelSmoother": "paceline.pytorch.model.loss",
    "LengthGroupedSampler": "paceline.pytorch.data.samplers",
    "MLflowCallback": "paceline.callbacks.reporters.mlflow",
    "Member": "paceline.args.members",
    "MembersTrainer": "paceline.pytorch.members.trainer",
    "MixedDataset": "paceline.pytorch.data.mixing",
    "MixedStream": "paceline.pytorch.data.mixing",
    "Mixup": "paceline.args.regularizers",
    "NeptuneCallback": "paceline.callbacks.reporters.neptune",
    "NotebookProgressCallback": "paceline.callbacks.notebook",
    "OptimizerNames": "paceline.args.choices",
    "ParallelMode": "paceline.args.choices",
    "Plan": "paceline.args.plan",
    "PredictionOutput": "paceline.core.outputs",
    "PrinterCallback": "paceline.callbacks.printer",
    "ProgressCallback": "paceline.callbacks.progress",
    "Phase": "paceline.args.phases",
    "Pruning": "paceline.pytorch.pruning.callback",
    "PushToHubCallback": "paceline.tensorflow.keras_callbacks",
    "Regularizer": "paceline.args.regularizers",
    "ReportCallback": "paceline.callbacks.report",
    "SAM": "paceline.args.regularizers",
    "SaveStrategy": "paceline.args.choices",
    "SchedulerType": "paceline.args.choices",
    "Seq2SeqTrainer": "paceline.pytorch.seq2seq",
    "Seq2SeqTrainingArguments": "paceline.args.seq2seq",
    "ShardSampler": "paceline.pytorch.data.samplers",
    "ShuffleBuffer": "paceline.pytorch.data.shuffle",
    "SnapshotEnsemble": "paceline.pytorch.ensembles.snapshots",
    "StreamingMetric": "paceline.core.contracts",
    "SwanLabCallback": "paceline.callbacks.reporters.swanlab",
    "TFTrainer": "paceline.tensorflow.trainer",
    "TFTrainingArguments": "paceline.tensorflow.arguments",
    "TensorBoardCallback": "paceline.callbacks.reporters.tensorboard",
    "TestTimeAugmentation": "paceline.predictions.augmentation",
    "TrackioCallback": "paceline.callbacks.reporters.trackio",
    "TrainOutput": "paceline.core.outputs",
    "Trainer": "paceline.pytorch.trainer",
    "TrainerCallback": "paceline.core.events",
    "TrainerControl": "paceline.core.state",
    "TrainerState": "paceline.core.state",
    "TrainingArguments": "paceline.args.training",
    "UnsupportedOption": "paceline.args.plan",
    "WarmUp": "paceline.tensorflow.optim.schedules",
    "WandbCallback": "paceline.callbacks.reporters.wandb",
    "check_targets": "paceline.pytorch.model.check_targets",
    "create_optimizer": "paceline.tensorflow.optim.optimizers",
    "default_compute_objective": "paceline.core.metrics",
    "default_data_collator": "paceline.pytorch.data.collators",
    "default_hp_space_optuna": "paceline.search.spaces",
    "default_hp_space_ray": "paceline.search.spaces",
    "default_hp_space_wandb": "paceline.search.spaces",
    "enable_full_determinism": "paceline.pytorch.distributed.random",
    "ensemble_predict": "paceline.predictions.ensemble",
    "find_executable_batch_size": "paceline.pytorch.distributed.batch_size",
    "get_adafactor_schedule": "paceline.pytorch.optim.schedulers",
    "get_constant_schedule": "paceline.pytorch.optim.schedulers",
    "get_constant_schedule_with_warmup": "paceline.pytorch.optim.schedulers",
    "get_cosine_schedule_with_warmup": "paceline.pytorch.optim.schedulers",
    "get_cosine_with_hard_restarts_schedule_with_warmup": "paceline.pytorch.optim.schedulers",
    "get_cosine_with_min_lr_schedule_with_warmup": "paceline.pytorch.optim.schedulers",
    "get_cosine_with_min_lr_schedule_with_warmup_lr_rate": "paceline.pytorch.optim.schedulers",
    "get_greedy_schedule": "paceline.pytorch.optim.schedulers",
    "get_inverse_sqrt_schedule": "paceline.pytorch.optim.schedulers",
    "get_last_checkpoint": "paceline.checkpoint.folders",
    "get_length_grouped_indices": "paceline.pytorch.data.samplers",
    "get_linear_schedule_with_warmup": "paceline.pytorch.optim.schedulers",
    "get_polynomial_decay_schedule_with_warmup": "paceline.pytorch.optim.schedulers",
    "get_reduce_on_plateau_schedule": "paceline.pytorch.optim.schedulers",
    "get_scheduler": "paceline.pytorch.optim.schedulers",
    "get_wsd_schedule": "paceline.pytorch.optim.schedulers",
    "replay": "paceline.pytorch.replay.step",
    "rotate_checkpoints": "paceline.checkpoint.folders",
    "set_seed": "paceline.pytorch.distributed.random",
    "simulated_processes": "paceline.pytorch.distributed.simulated",
    "sort_checkpoints": "paceline.checkpoint.folders",
    "speed_metrics": "paceline.core.metrics",
}

# without the TensorFlow names, so that `import *` works if it is not installed
__all__ = sorted(name for name, home in _HOMES.items() if not home.startswith("paceline.tensorflow."))


mask_logs("paceline")
if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun, also by `paceline launch`
    importlib.import_module("paceline.core.said_once").install("paceline", os.environ)


def __getattr__(name: str) -> Any:
    if name == "drop_in":
        return importlib.import_module("paceline.drop_in")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    # a garbage collection during the import traverses all of torch's objects, half of the import time
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        value = getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        text = f'torch is required for {name}: pip install "paceline[torch]"'
        raise ModuleNotFoundError(text, name="torch") from error
    finally:
        if was_enabled:
            gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
