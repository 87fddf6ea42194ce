"""From a batch to a loss: the default way, and the adapter for every way a user overrides it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paceline.model.loss import LabelSmoother, LossRule, Meaning
from paceline.model.outputs import LossPlace, check_loss, find_loss, read_loss
from paceline.model.signature import ForwardSignature


class Objective:
    """Calls the model and makes the loss: the body of `Trainer.compute_loss`.

    Args:
        signature: what `forward` accepts.
        label_names: names under which a batch carries its targets.
        rule: told whether `num_items_in_batch` reached whoever computed the loss.
        compute_loss_func: `(outputs, labels, num_items_in_batch=None) -> loss`, instead of the model's own loss.
        smoother: smooths the cross-entropy, instead of the model's own loss.

    Attributes:
        loss_place: tells a loss without a name from a prediction, over all batches that were evaluated.
    """

    def __init__(
        self,
        signature: ForwardSignature,
        label_names: Sequence[str],
        rule: LossRule,
        compute_loss_func: Callable[..., Tensor] | None = None,
        smoother: LabelSmoother | None = None,
    ) -> None:
        self.label_names = tuple(label_names)
        self.rule = rule
        self.compute_loss_func = compute_loss_func
        self.smoother = smoother
        self.loss_place = LossPlace()
        self._func_takes_num_items = compute_loss_func is not None and accepts(compute_loss_func, "num_items_in_batch")
        self.read(signature)

    def read(self, signature: ForwardSignature) -> None:
        """Take over what `forward` accepts."""
        self.signature = signature
        self.accepted = frozenset(signature.names)
        # whether a count of the whole update's targets would be used
        by_model = self.compute_loss_func is None and self.smoother is None and signature.takes_num_items
        self.wants_num_items = self._func_takes_num_items or by_model

    def __call__(self, model: nn.Module, inputs: Any, num_items: Any = None) -> tuple[Tensor | None, Any]:
        """The loss and the model's outputs; the loss is None only where no gradient is asked and there is none."""
        if type(num_items) is WatchedCount:
            num_items = num_items.count
        if self.compute_loss_func is not None:
            return self._by_function(model, inputs, num_items)
        if self.smoother is not None and isinstance(inputs, Mapping):
            labels = inputs.get(self.label_names[0]) if self.label_names else None
            if labels is not None:
                return self._smoothed(self.smoother, model, inputs, labels)
            if torch.is_grad_enabled():
                raise ValueError(
                    f"label_smoothing_factor={self.smoother.epsilon}: the training batches hold no targets under "
                    f"{' or '.join(map(repr, self.label_names))}, only {', '.join(map(str, inputs))}; name them in "
                    "label_names=[...], or leave label_smoothing_factor out."
                )
        gives_count = num_items is not None and self.signature.takes_num_items
        if gives_count != self.rule.is_assumed_scaled:
            self.rule.assume_scaled(gives_count)
        if gives_count:
            outputs = self.call(model, {**inputs, "num_items_in_batch": num_items})
        elif type(inputs) is dict and self.accepted.issuperset(inputs):  # the common case, without another hop
            try:
                outputs = model(**inputs)
            except TypeError as error:
                self._explain(error, inputs)
                raise
        else:
            outputs = self.call(model, inputs)
        if torch.is_grad_enabled():
            return read_loss(outputs, inputs), outputs
        return find_loss(outputs), outputs

    def call(self, model: nn.Module, inputs: Any) -> Any:
        """The model on a batch: by name, leaving out names that `forward` does not know."""
        if type(inputs) is dict or isinstance(inputs, Mapping):
            known = inputs
            if not self.signature.takes_keywords and not self.accepted.issuperset(inputs):
                known = {name: value for name, value in inputs.items() if name in self.accepted}
            try:
                return model(**known)
            except TypeError as error:
                self._explain(error, inputs)
                raise
        return model(*inputs) if isinstance(inputs, list | tuple) else model(inputs)

    def name_inputs(self, batch: Any) -> Any:
        """A tuple or a single tensor under the names of `forward`'s parameters, in their order; dicts as they are.

        What comes after the last parameter is what the loss is taken against, where `forward` takes no labels.
        """
        if type(batch) is dict or isinstance(batch, Mapping) or not self.signature.names:
            return batch
        values = batch if isinstance(batch, list | tuple) else [batch]
        if values and isinstance(values[0], Mapping):
            return batch  # samples that the collator left as they are, for an own `_prepare_inputs`
        names = (*self.signature.names, *(name for name in self.label_names if name not in self.accepted))
        if len(values) > len(names):
            raise ValueError(
                f"A batch of {len(values)} values cannot be given to forward({', '.join(self.signature.names)}): let "
                "the dataset return dicts with the names of forward's parameters, or override Trainer.compute_loss and "
                "make them in a data_collator."
            )
        return dict(zip(names, values, strict=False))

    def _explain(self, error: TypeError, inputs: Mapping[str, Any]) -> None:
        """Raise a clearer error for a batch without something that `forward` cannot do without.

        Asked only when the call has failed, so that the steps that work pay nothing.
        """
        missing = [name for name in self.signature.names if name in self.signature.required and name not in inputs]
        if not any(repr(name) in str(error) for name in missing):
            return
        raise TypeError(
            f"The model's forward({', '.join(self.signature.names)}) needs {', '.join(missing)}, and the batch holds "
            f"{', '.join(inputs)}: give the dataset's columns those names (the others are left out, unless "
            "remove_unused_columns=False), or make the batch in a data_collator."
        ) from error

    def _by_function(self, model: nn.Module, inputs: Any, num_items: Any) -> tuple[Tensor, Any]:
        labels, rest = self._take_labels(inputs)
        outputs = self.call(model, rest)
        assert self.compute_loss_func is not None
        if self._func_takes_num_items:
            if (num_items is not None) != self.rule.is_assumed_scaled:
                self.rule.assume_scaled(num_items is not None)
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items)
        else:
            loss = self.compute_loss_func(outputs, labels)
        return check_loss(loss, "compute_loss_func"), outputs

    def _take_labels(self, inputs: Any) -> tuple[Any, Any]:
        """(labels, the other inputs); labels that `forward` cannot do without stay among the inputs too."""
        if not isinstance(inputs, Mapping):
            return None, inputs
        found = {name: inputs[name] for name in self.label_names if name in inputs}
        rest = {k: v for k, v in inputs.items() if k not in found or k in self.signature.required}
        if not found:
            return None, rest
        return (next(iter(found.values())) if len(found) == 1 else found), rest

    def _smoothed(self, smoother: LabelSmoother, model: nn.Module, inputs: Any, labels: Tensor) -> tuple[Tensor, Any]:
        """The smoothed loss. Whether targets are shifted is read off the model's own loss, where it returns one."""
        outputs = self.call(model, inputs)
        rule = self.rule
        if not rule.is_settled:
            own = find_loss(outputs)
            if own is not None:
                rule.look(own.detach(), outputs, rule.count(inputs))
            rule.settle(Meaning("tokens", shifted=rule.meaning.shifted))
        return smoother(outputs, labels, shift_labels=rule.meaning.shifted), outputs


class WatchedCount(Tensor):
    """`num_items_in_batch` that knows whether anyone computed with it.

    A loss that took it and cannot be recomputed from logits was divided by it if it was used, and was not if not.
    """

    count: Tensor
    is_used: bool

    @classmethod
    def of(cls, count: Tensor) -> WatchedCount:
        """Watch a count from now on."""
        watched = count.as_subclass(cls)
        watched.count, watched.is_used = count, False
        return watched

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plain, named = tree_map(cls._take, (args, kwargs))
        return func(*plain, **named)

    @classmethod
    def _take(cls, value: Any) -> Any:
        if type(value) is not cls:
            return value
        value.__dict__["is_used"] = True
        return value.__dict__["count"]


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether a function takes a keyword argument of this name."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    return name in parameters or any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def adapted(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    """A method to call with so many values; the last is left out where a subclass wrote it before that was there."""
    if takes(function, number):
        return function

    def call(*values: Any) -> Any:
        return function(*values[:-1])

    return call


def takes(function: Callable[..., Any], number: int) -> bool:
    """Whether a function can be called with so many values."""
    try:
        inspect.signature(function).bind(*range(number))
    except TypeError:
        return False
    except ValueError:  # it tells nothing
        return True
    return True


def compute_loss_with_outputs(
    compute_loss: Callable[..., Any], model: nn.Module, inputs: Any, num_items: Any = None
) -> tuple[Any, Any]:
    """The loss of a batch and what the model returned for it, from a Trainer's `compute_loss`, old or new.

    The documentation of transformers printed several forms over the years: `(model, inputs)`,
    `(model, inputs, return_outputs=False)` and with `num_items_in_batch`. All of them work: where the method does not
    hand out the outputs, they are caught on their way out of the model.
    """
    counts = {"num_items_in_batch": num_items} if accepts(compute_loss, "num_items_in_batch") else {}
    if accepts(compute_loss, "return_outputs"):
        loss, outputs = compute_loss(model, inputs, return_outputs=True, **counts)
        return loss, outputs
    seen: list[Any] = []
    handle = model.register_forward_hook(lambda module, args, outputs: seen.append(outputs))
    try:
        loss = compute_loss(model, inputs, **counts)
    finally:
        handle.remove()
    return loss, seen[-1] if seen else None
