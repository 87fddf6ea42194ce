"""Computes the loss of a batch by default, and adapts the ways in which users override it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.args.errors import UnsupportedOption
from paceline.pytorch.model.loss import LabelSmoother, LossNormalizer, LossReduction
from paceline.pytorch.model.outputs import IncompleteBatch, LossPlace, check_loss, find_loss, read_loss
from paceline.pytorch.model.signature import ForwardSignature

if TYPE_CHECKING:
    from paceline.pytorch.model.linear_loss import LinearLoss


class Objective:
    """Calls the model and computes the loss: the body of `Trainer.compute_loss`.

    Args:
        signature: the parameters of `forward`.
        label_names: names under which a batch carries its targets.
        normalizer: records if `num_items_in_batch` was passed to the code that computed the loss.
        compute_loss_func: `(outputs, labels, num_items_in_batch=None) -> loss`, replaces the model's own loss.
        smoother: computes a smoothed cross-entropy, which replaces the model's own loss.
        linear_loss: computes cross-entropies over the model's head in chunks; None disables it.

    Attributes:
        further_names: names of inputs that others than the model take.
        loss_place: distinguishes an unnamed loss from a prediction, over all evaluated batches.
    """

    further_names: tuple[str, ...] = ()

    def __init__(
        self,
        signature: ForwardSignature,
        label_names: Sequence[str],
        normalizer: LossNormalizer,
        compute_loss_func: Callable[..., Tensor] | None = None,
        smoother: LabelSmoother | None = None,
        linear_loss: LinearLoss | None = None,
    ) -> None:
        self.label_names = tuple(label_names)
        self.normalizer = normalizer
        self.compute_loss_func = compute_loss_func
        self.smoother = smoother
        self.linear_loss = linear_loss
        self.loss_place = LossPlace()
        self._shifts: bool | None = None  # True if the smoothed loss shifts its targets, once known
        self._func_takes_num_items = compute_loss_func is not None and accepts(compute_loss_func, "num_items_in_batch")
        self.read(signature)

    def read(self, signature: ForwardSignature) -> None:
        """Sets the signature of `forward`."""
        self.signature = signature
        self.accepted = frozenset(signature.names)
        # True if the loss uses the number of targets of the whole optimizer step
        by_model = self.compute_loss_func is None and self.smoother is None and signature.takes_num_items
        self.wants_num_items = self._func_takes_num_items or by_model

    def report_to(self, normalizer: LossNormalizer) -> None:
        """Sets what records if `num_items_in_batch` was passed."""
        self.normalizer = normalizer
        if self.linear_loss is not None:
            self.linear_loss.report_to(normalizer)

    def __call__(self, model: nn.Module, inputs: Any, num_items: Any = None) -> tuple[Tensor | None, Any]:
        """Returns the loss and the model's outputs; the loss is None only if no gradient is needed."""
        if self.linear_loss is not None and not self.linear_loss.is_entered:
            with self.linear_loss.entered(model):
                return self(model, inputs, num_items)
        if self.compute_loss_func is not None:
            return self._by_function(model, inputs, num_items)
        if self.smoother is not None and isinstance(inputs, Mapping):
            labels = inputs.get(self.label_names[0]) if self.label_names else None
            if labels is not None:
                return self._smoothed(self.smoother, model, inputs, labels)
            if torch.is_grad_enabled():
                raise IncompleteBatch(
                    f"label_smoothing_factor={self.smoother.epsilon}: the training batches hold no targets under "
                    f"{' or '.join(map(repr, self.label_names))}, only {', '.join(map(str, inputs))}; name them in "
                    "label_names=[...], or leave label_smoothing_factor out."
                )
        if num_items is not None and self.signature.takes_num_items:
            self.normalizer.passes_count = True
            outputs = self.call(model, {**inputs, "num_items_in_batch": num_items})
        elif type(inputs) is dict and self.accepted.issuperset(inputs):  # fast path for the common case: saves a call
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

    @contextmanager
    def without_count(self) -> Iterator[None]:
        """Context in which no loss is given `num_items_in_batch`."""
        wanted, self.wants_num_items = self.wants_num_items, False
        try:
            yield
        finally:
            self.wants_num_items = wanted

    def with_logits(self) -> AbstractContextManager[None]:
        """Returns a context in which the model's logits are computed, for callers that read them."""
        return nullcontext() if self.linear_loss is None else self.linear_loss.suspended()

    @property
    def computes_no_logits(self) -> bool:
        """Returns True if the loss of the current training is computed without logits, as far as is known."""
        return self.linear_loss is not None and self.linear_loss.is_right is True

    @property
    def chunks_verdict(self) -> bool | None:
        """Returns the result of the check of the chunked loss; None before it, and if there is none."""
        return None if self.linear_loss is None else self.linear_loss.is_right

    def for_reader(self) -> AbstractContextManager[None]:
        """Returns the context of a pass whose outputs are given to a caller."""
        return nullcontext() if self.linear_loss is None else self.linear_loss.for_reader()

    def unread(self) -> AbstractContextManager[None]:
        """Returns a context of passes whose outputs are given to a caller who does not read the logits."""
        return nullcontext() if self.linear_loss is None else self.linear_loss.unread()

    def call(self, model: nn.Module, inputs: object) -> Any:
        """Returns the model's outputs for a batch; entries of a dict that `forward` does not take are dropped."""
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

    def name_inputs(self, batch: object) -> Any:
        """Returns the values of a tuple, or a single tensor, named by `forward`'s parameters in order.

        If `forward` takes no labels, the values after its parameters are the targets of the loss. Dicts are unchanged.
        """
        if type(batch) is dict or isinstance(batch, Mapping) or not self.signature.names:
            return batch
        values = batch if isinstance(batch, list | tuple) else [batch]
        if values and isinstance(values[0], Mapping):
            return batch  # uncollated samples, for an overridden `_prepare_inputs`
        names = (*self.signature.names, *(name for name in self.label_names if name not in self.accepted))
        if len(values) > len(names):
            raise ValueError(
                f"A batch of {len(values)} values cannot be given to forward({', '.join(self.signature.names)}): let "
                "the dataset return dicts with the names of forward's parameters, or override Trainer.compute_loss and "
                "make them in a data_collator."
            )
        return dict(zip(names, values, strict=False))

    def _explain(self, error: TypeError, inputs: Mapping[str, Any]) -> None:
        """Raises a clearer error for a batch that lacks a required input of `forward`.

        Called only after a failed call, so that it costs nothing otherwise.
        """
        missing = [name for name in self.signature.names if name in self.signature.required and name not in inputs]
        if not any(repr(name) in str(error) for name in missing):
            return
        raise IncompleteBatch(
            f"The model's forward({', '.join(self.signature.names)}) needs {', '.join(missing)}, and the batch holds "
            f"{', '.join(inputs) or 'nothing else'}: give the dataset's columns those names (the others are left out, "
            "unless remove_unused_columns=False), or make the batch in a data_collator."
        ) from error

    @property
    def has_function(self) -> bool:
        """Returns True if `compute_loss_func` computes the loss."""
        return self.compute_loss_func is not None

    def loss_of_function(self, outputs: Any, targets: Mapping[str, Tensor], num_items: object) -> Tensor:
        """Returns the loss that `compute_loss_func` computes.

        Args:
            outputs: the model's outputs.
            targets: by name; the function is given a single one without its name.
            num_items: `num_items_in_batch`, or None.
        """
        labels = next(iter(targets.values())) if len(targets) == 1 else targets
        return self._call_function(outputs, labels, num_items)

    def _by_function(self, model: nn.Module, inputs: object, num_items: object) -> tuple[Tensor, Any]:
        labels, rest = self._take_labels(inputs)
        return self._call_with(model, rest, lambda outputs: self._call_function(outputs, labels, num_items))

    def _call_with(self, model: nn.Module, inputs: object, loss_of: Callable[[Any], Tensor]) -> tuple[Tensor, Any]:
        """Returns the loss that a function computes from the outputs of the model, and these."""
        if self.linear_loss is not None:
            return self.linear_loss.call(lambda: self.call(model, inputs), loss_of)
        outputs = self.call(model, inputs)
        return loss_of(outputs), outputs

    def _call_function(self, outputs: Any, labels: Any, num_items: object) -> Tensor:
        assert self.compute_loss_func is not None
        self.normalizer.calls_function = True
        if self._func_takes_num_items:
            self.normalizer.passes_count = num_items is not None
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items)
        else:
            loss = self.compute_loss_func(outputs, labels)
        return check_loss(loss, "compute_loss_func")

    def _take_labels(self, inputs: object) -> tuple[Any, Any]:
        """Returns (labels, other inputs); the inputs keep labels that `forward` requires."""
        if not isinstance(inputs, Mapping):
            return None, inputs
        found = {name: inputs[name] for name in self.label_names if name in inputs}
        rest = {k: v for k, v in inputs.items() if k not in found or k in self.signature.required}
        if not found:
            return None, rest
        return (next(iter(found.values())) if len(found) == 1 else found), rest

    def _smoothed(
        self, smoother: LabelSmoother, model: nn.Module, inputs: object, labels: Tensor
    ) -> tuple[Tensor, Any]:
        """Returns the smoothed loss and the outputs; the model's own loss shows if targets are shifted."""

        def loss_of(outputs: Any) -> Tensor:
            if self._shifts is None:
                assumed = self.normalizer.shifts
                self._shifts = smoother.find_shift(outputs, labels, assumed)
                self.normalizer.know(LossReduction("tokens", shifted=assumed if self._shifts is None else self._shifts))
            return self.smoothed_loss(outputs, labels)

        return self._call_with(model, inputs, loss_of)

    def smoothed_loss(self, outputs: Any, labels: Tensor) -> Tensor:
        """Returns the smoothed loss of outputs; `label_smoothing_factor` must be set."""
        assert self.smoother is not None
        shifted = self.normalizer.shifts if self._shifts is None else self._shifts
        return self.smoother(outputs, labels, shift_labels=shifted)


def check_was_called(option: str, was_called: bool) -> None:
    """Checks that the training step has called the objective.

    Raises:
        UnsupportedOption: it computed its loss by itself, so that `option`, which changes or records it, had no effect.
    """
    if not was_called:
        raise UnsupportedOption(
            f"{option} would have no effect, because the overridden training_step computes its loss by itself: call "
            "super().training_step(...) there, or leave it out."
        )


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Returns True if a function takes a keyword argument of this name, or if its signature cannot be read."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    return name in parameters or any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def adapted(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Returns a function to call with `number` values; it drops the last one if an older override does not take it."""
    if takes(function, number):
        return function

    def call(*values: Any) -> Any:
        return function(*values[:-1])

    return call


def takes(function: Callable[..., Any], number: int) -> bool:
    """Returns True if a function can be called with `number` values, or if its signature cannot be read."""
    try:
        inspect.signature(function).bind(*range(number))
    except TypeError:
        return False
    except ValueError:  # its signature is unreadable
        return True
    return True


def compute_loss_with_outputs(
    compute_loss: Callable[..., Any],
    model: nn.Module,
    inputs: object,
    num_items: object = None,
) -> tuple[Any, Any]:
    """Returns the loss of a batch and the model's outputs, from any form of a Trainer's `compute_loss`.

    The documentation of transformers has shown several forms over the years: `(model, inputs)`, `(model, inputs,
    return_outputs=False)` and with `num_items_in_batch`. All are supported; if the method does not return the outputs,
    a hook captures them from the model.
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
