"""Adding up the input tokens and the operations of a run, window by window, on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paceline.model.operations import count_inputs, operations_per_token
from paceline.model.signature import innermost

if TYPE_CHECKING:
    from paceline.shared_engine import Exchange
    from paceline.trainer import Trainer


def measurer(trainer: Trainer) -> Callable[[Sequence[Any]], tuple[int, int]] | None:
    """`(micro-batches) -> (input tokens, operations)`, counted on the host; None where there is neither."""
    count_tokens, model = token_counter(trainer), innermost(trainer.model)
    base: Any = next(kind for kind in type(trainer).__mro__ if kind.__module__ == "paceline.trainer")
    is_own = getattr(trainer.floating_point_ops, "__func__", None) is not base.floating_point_ops
    per_token = operations_per_token(model)  # counted once: going through all parameters takes a while
    asks = is_own or callable(getattr(model, "floating_point_ops", None))
    if count_tokens is None and not per_token and not asks:
        return None

    def measure(batches: Sequence[Any]) -> tuple[int, int]:
        tokens = sum(map(count_tokens, batches)) if count_tokens is not None else 0
        if asks:
            return tokens, sum(map(trainer.floating_point_ops, batches))
        return tokens, per_token * sum(count_inputs(model, batch) for batch in batches) if per_token else 0

    return measure


def counter(trainer: Trainer, exchange: Exchange | None) -> Callable[[Sequence[Any]], None] | None:
    """Adds up the input tokens and the operations of each window, of all processes; None where neither is counted."""
    if exchange is not None:
        return partial(add_exchanged, trainer, exchange) if exchange.measure is not None else None
    measure = measurer(trainer)
    if measure is None:
        return None

    def count(batches: Sequence[Any]) -> None:
        tokens, operations = measure(batches)
        trainer.state.num_input_tokens_seen += tokens
        trainer.current_flos += operations

    return count


def add_exchanged(trainer: Trainer, exchange: Exchange, batches: Sequence[Any]) -> None:
    """Add what the processes counted together, before the update."""
    trainer.state.num_input_tokens_seen += exchange.tokens
    trainer.current_flos += exchange.operations


def token_counter(trainer: Trainer) -> Callable[[Any], int] | None:
    """Counts a batch's input tokens on the host, or None where `include_num_input_tokens_seen` does not ask."""
    how = str(trainer.args.include_num_input_tokens_seen)
    if how == "no":
        return None
    name = getattr(trainer.model, "main_input_name", "input_ids")
    padding = getattr(trainer.processing_class, "pad_token_id", None)

    def count(batch: Any) -> int:
        tokens = batch.get(name) if hasattr(batch, "get") else None
        if not isinstance(tokens, Tensor):
            raise ValueError(
                f"include_num_input_tokens_seen={how!r}: the batches hold no tensor {name!r}. Set `main_input_name` on "
                "the model to the name of its input, or include_num_input_tokens_seen='no'."
            )
        if how == "all":
            return tokens.numel()
        if isinstance(batch.get("attention_mask"), Tensor):
            return int(batch["attention_mask"].sum())
        return tokens.numel() if padding is None else int((tokens != padding).sum())

    return count
