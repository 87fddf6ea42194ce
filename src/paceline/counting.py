"""Adding up the input tokens and the operations of a run, window by window, on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paceline.model.operations import count_inputs, operations_per_token
from paceline.model.signature import innermost

if TYPE_CHECKING:
    from paceline.trainer import Trainer


def counter(trainer: Trainer) -> Callable[[Sequence[Any]], None] | None:
    """Adds up the input tokens and the operations of each window, on the host; None where there is neither."""
    count_tokens, model = token_counter(trainer), innermost(trainer.model)
    base: Any = next(kind for kind in type(trainer).__mro__ if kind.__module__ == "paceline.trainer")
    is_own = getattr(trainer.floating_point_ops, "__func__", None) is not base.floating_point_ops
    per_token = operations_per_token(model)  # counted once: going through all parameters takes a while
    asks = is_own or callable(getattr(model, "floating_point_ops", None))
    if count_tokens is None and not per_token and not asks:
        return None

    def count(batches: Sequence[Any]) -> None:
        if count_tokens is not None:
            trainer.state.num_input_tokens_seen += sum(map(count_tokens, batches))
        if asks:
            trainer.current_flos += sum(map(trainer.floating_point_ops, batches))
        elif per_token:
            trainer.current_flos += per_token * sum(count_inputs(model, batch) for batch in batches)

    return count


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
