"""paceline: trains any PyTorch module. Names are loaded at first use: importing the package loads no torch."""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.args.parser import HfArgumentParser
    from paceline.args.plan import Plan, UnsupportedOption
    from paceline.args.seq2seq import Seq2SeqTrainingArguments
    from paceline.args.training import TrainingArguments
    from paceline.callbacks.early_stopping import EarlyStoppingCallback
    from paceline.callbacks.flow import DefaultFlowCallback
    from paceline.callbacks.printer import PrinterCallback
    from paceline.callbacks.progress import ProgressCallback
    from paceline.core.events import CallbackHandler, TrainerCallback
    from paceline.core.folders import get_last_checkpoint
    from paceline.core.outputs import BestRun, EvalLoopOutput, EvalPrediction, PredictionOutput, TrainOutput
    from paceline.core.state import ExportableState, TrainerControl, TrainerState
    from paceline.core.streaming import StreamingMetric
    from paceline.data.collate_seq2seq import DataCollatorForSeq2Seq
    from paceline.data.collators import DataCollatorWithPadding, DefaultDataCollator, default_data_collator
    from paceline.data.shuffle import ShuffleBuffer
    from paceline.distributed.random import enable_full_determinism, set_seed
    from paceline.model.check_targets import check_targets
    from paceline.optim.schedulers import get_scheduler
    from paceline.replaying import replay
    from paceline.seq2seq import Seq2SeqTrainer
    from paceline.trainer import Trainer

__version__ = "0.1.0"

# public name -> the module that defines it
_HOMES = {
    "BestRun": "paceline.core.outputs",
    "CallbackHandler": "paceline.core.events",
    "DataCollatorForSeq2Seq": "paceline.data.collate_seq2seq",
    "DataCollatorWithPadding": "paceline.data.collators",
    "DefaultDataCollator": "paceline.data.collators",
    "DefaultFlowCallback": "paceline.callbacks.flow",
    "EarlyStoppingCallback": "paceline.callbacks.early_stopping",
    "EvalLoopOutput": "paceline.core.outputs",
    "EvalPrediction": "paceline.core.outputs",
    "ExportableState": "paceline.core.state",
    "HfArgumentParser": "paceline.args.parser",
    "Plan": "paceline.args.plan",
    "PredictionOutput": "paceline.core.outputs",
    "PrinterCallback": "paceline.callbacks.printer",
    "ProgressCallback": "paceline.callbacks.progress",
    "Seq2SeqTrainer": "paceline.seq2seq",
    "Seq2SeqTrainingArguments": "paceline.args.seq2seq",
    "StreamingMetric": "paceline.core.streaming",
    "ShuffleBuffer": "paceline.data.shuffle",
    "TrainOutput": "paceline.core.outputs",
    "Trainer": "paceline.trainer",
    "TrainerCallback": "paceline.core.events",
    "TrainerControl": "paceline.core.state",
    "TrainerState": "paceline.core.state",
    "TrainingArguments": "paceline.args.training",
    "UnsupportedOption": "paceline.args.plan",
    "check_targets": "paceline.model.check_targets",
    "default_data_collator": "paceline.data.collators",
    "enable_full_determinism": "paceline.distributed.random",
    "get_last_checkpoint": "paceline.core.folders",
    "get_scheduler": "paceline.optim.schedulers",
    "replay": "paceline.replaying",
    "set_seed": "paceline.distributed.random",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
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
