"""The event `on_within_evaluation`, between an evaluation's passes and its log row, and what it gives to callbacks.

A second file of the facade, which binds the tools of the event to a Trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paceline.args.errors import UnsupportedOption
from paceline.core.events import call_own_event
from paceline.core.methods import is_ours
from paceline.core.outputs import EvalLoopOutput
from paceline.pytorch import parts
from paceline.pytorch.data.batches import batch_size_of
from paceline.pytorch.data.loading import named_dataset
from paceline.pytorch.distributed.collectives import gather_objects
from paceline.pytorch.distributed.precision import narrow
from paceline.pytorch.distributed.random import preserved_rng
from paceline.pytorch.evaluation.predictor import evaluating
from paceline.pytorch.evaluation.samples import EvaluationTools, Step
from paceline.pytorch.model import generation

if TYPE_CHECKING:
    from paceline.pytorch.trainer import Trainer

EVENT = "on_within_evaluation"


def fire(trainer: Trainer, loader: object, dataset: object, prefix: str, metrics: dict[str, float]) -> None:
    """Calls the event of the callbacks that have it; entries that they add to the metrics are in the log row.

    Args:
        trainer: the Trainer, whose evaluation has run.
        loader: the loader of the evaluation.
        dataset: the dataset, or a name in the Trainer's; None: the Trainer's.
        prefix: prefix of the metrics.
        metrics: the metrics of the evaluation.
    """
    tools = tools_of(trainer, loader, dataset, prefix)
    call_own_event(
        trainer.callback_handler,
        EVENT,
        trainer._own_options,
        trainer.state,
        trainer.control,
        metrics=metrics,
        evaluation=tools,
        processing_class=trainer.processing_class,
    )


def tools_of(trainer: Trainer, loader: object, dataset: object, prefix: str) -> EvaluationTools:
    """Returns what the event gives to callbacks."""
    is_own_loader = not is_ours(trainer.get_eval_dataloader)
    data, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    if data is None or collate is None or not is_own_loader:
        data = named_dataset(trainer.eval_dataset, dataset)
        collate = trainer._get_collator_with_removed_columns(trainer.data_collator, "evaluation")
    return EvaluationTools(
        prefix=prefix,
        dataset=data,
        model=trainer.model,
        processing_class=trainer.processing_class,
        batch_size=trainer.args.eval_batch_size,
        label_names=trainer.label_names or trainer.objective.label_names,
        collate=lambda rows: trainer.objective.name_inputs(collate(rows)),
        predict=partial(predict, trainer),
        generate=partial(generate, trainer),
        place=trainer._prepare_inputs,
        evaluated=partial(evaluated, trainer),
        rank=trainer.world.process_index,
        world_size=trainer.world.world_size,
        gather=partial(gather_objects, trainer.world),
        log_table=trainer.log_table,
        log_figure=trainer.log_figure,
        generates=bool(getattr(trainer.args, "predict_with_generate", False)),
        shards=trainer.strategy.in_step,
        has_stages=trainer.strategy.runs_windows,
    )


@contextmanager
def evaluated(trainer: Trainer) -> Iterator[None]:
    """Returns a context with the model as it is evaluated; random numbers are put back at its end."""
    with ExitStack() as stack:
        stack.enter_context(preserved_rng())
        for context in parts.evaluator_of(trainer).contexts:
            stack.enter_context(context())
        stack.enter_context(evaluating(trainer.model))
        yield


def predict(trainer: Trainer, batches: list[Any], step: Step | None) -> EvalLoopOutput:
    """Returns the predictions and labels of batches, which all processes hold; each runs its share. A collective."""
    options = parts.evaluation_options_of(trainer)
    loop = parts.evaluation_loop_of(
        trainer,
        prediction_step=trainer.prediction_step if step is None else step,
        compute_metrics=None,
        preprocess_logits=None,
        options=replace(options, concatenate=True, streaming=False, include=(), extra_rows=()),
        on_step=lambda: None,
        expect=None,
        augmented=None,
        probes=False,
    )
    rank, size = trainer.strategy.data_coordinates()
    with evaluated(trainer):
        return loop.run(batches[rank::size], loss_only=False, ignore_keys=None, prefix="")


def generate(trainer: Trainer, inputs: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """Returns the token ids that the Trainer's model generates for a batch on the device, without labels.

    Raises:
        UnsupportedOption: the model is sharded and cast for evaluation.
    """
    args, strategy = trainer._own_options, trainer.strategy
    if args.fp16_full_eval or args.bf16_full_eval:
        if strategy.in_step:
            raise UnsupportedOption(
                "Generation with bf16_full_eval or fp16_full_eval is not supported for a sharded model: leave them out."
            )
        # `generate` calls a model's encoder directly, without the model's `forward` that would cast the inputs
        inputs = narrow(inputs, torch.float16 if args.fp16_full_eval else torch.bfloat16, kept=())
    if strategy.in_step:
        settings = generation.go_on_together(trainer.model, settings)
    call = partial(generation.call_generate, trainer.model, inputs, settings)
    with trainer.compute_loss_context_manager():
        generated = strategy.run_within(trainer.model, call)
    return generation.read_rows(generated, batch_size_of(inputs))
