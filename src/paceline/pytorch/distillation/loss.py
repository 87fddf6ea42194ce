"""Knowledge distillation: the loss of a student is mixed with its divergence from a teacher.

`DistilledObjective` computes the loss of a training pass as

    (1 - alpha) * hard + alpha * soft + layer_weight * hidden

where `hard` is the loss without a teacher, `soft` the divergence from the teacher's classes (Hinton et al., 2015,
arXiv:1503.02531), and `hidden` the distance of hidden states (Romero et al., 2015, arXiv:1412.6550). Without gradients,
in evaluations and probes of the loss, it is the hard loss: the probes find its reduction, and the others follow it.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.args.distillation import (
    DistillationSettings,
    check_with_teacher,
    check_without_teacher,
    settings_of,
)
from paceline.args.errors import UnsupportedOption
from paceline.args.sections import Options
from paceline.core.events import CallbackHandler, TrainerCallback
from paceline.pytorch.data.batches import recast
from paceline.pytorch.distillation.captures import Captures, masks_of_encoder, names_in_encoder
from paceline.pytorch.distillation.projections import Projections
from paceline.pytorch.distillation.teacher import check_teacher, find_teacher
from paceline.pytorch.distributed.collectives import sum_floats
from paceline.pytorch.distributed.strategy import SingleDevice
from paceline.pytorch.engine import Engine, to_floats
from paceline.pytorch.model.loss import LabelSmoother, LossNormalizer, LossReduction
from paceline.pytorch.model.objective import Objective
from paceline.pytorch.model.signature import innermost, read_signature
from paceline.pytorch.model.soft_targets import (
    TopClasses,
    check_classes,
    divergence,
    find_logits,
    hidden_distance,
    hidden_items,
    kept_items,
    reduce_items,
    top_classes,
)

logger = logging.getLogger(__name__)

LOSSES = ("hard_loss", "distillation_loss", "hidden_loss")
MOST_PENDING = 1000  # passes whose losses wait on the device


class DistilledObjective(Objective):
    """An objective whose losses of training passes are mixed with those of a teacher.

    Args:
        objective: computes the hard loss.
        distillation: computes the others.
    """

    def __init__(self, objective: Objective, distillation: Distillation) -> None:
        vars(self).update(vars(objective))
        self.distillation = distillation
        self.further_names = distillation.names_of_inputs
        if self.linear_loss is not None:
            logger.info(
                "linear_cross_entropy='auto': the logits are computed, since the soft loss of the teacher needs them."
            )
            self.linear_loss = None

    def __call__(self, model: nn.Module, inputs: Any, num_items: Any = None) -> tuple[Tensor | None, Any]:
        """Returns the loss and the model's outputs; without gradients, the hard loss."""
        if not torch.is_grad_enabled():
            return super().__call__(model, inputs, num_items)
        distillation = self.distillation
        given = recast(copy.copy(inputs), torch.clone)  # user code may change its inputs in place
        with self.with_logits():
            if distillation.is_unlabelled(inputs):
                hard, outputs = None, self.call(model, inputs)
            else:
                hard, outputs = super().__call__(model, inputs, num_items)
        return distillation.mix(hard, outputs, given, num_items), outputs


class LogitSource(Protocol):
    """Provides the teacher's logits for a pass of an engine, or its most likely classes."""

    def find(
        self, inputs: Mapping[str, Any], labels: Tensor | None, logits: Tensor, engine: Engine
    ) -> Tensor | TopClasses:
        """Returns the teacher's logits or classes for a batch; `logits` are the student's."""
        ...


class DistillationSteps(TrainerCallback):
    """Trains the projections of a distillation with the optimizer steps of a run."""

    def __init__(self, distillation: Distillation) -> None:
        self._distillation = distillation

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the passes of an optimizer step."""
        self._distillation.end_passes()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Trains the projections."""
        if self._distillation.projections.maps:
            self._distillation.projections.step(optimizer.param_groups[0]["lr"])


class Distillation:
    """Computes the losses of a teacher, and logs them; a meter and an item of checkpoints.

    Args:
        teacher: the teacher's module, which is neither trained nor saved.
        settings: the settings.
        normalizer: the loss normalizer, which knows the reduction of the hard loss and the names of the labels.
        seed: the seed of the projections.

    Attributes:
        projections: linear maps between hidden states of different widths.
        cache: the teacher's logits on disk; None: the teacher computes them in each pass.
    """

    def __init__(
        self, teacher: nn.Module, settings: DistillationSettings, normalizer: LossNormalizer, seed: int
    ) -> None:
        self.teacher, self.settings, self.normalizer = teacher, settings, normalizer
        self.projections = Projections(seed)
        signature = read_signature(teacher)
        self._caller = Objective(signature, normalizer.label_names, LossNormalizer(normalizer.label_names))
        config = getattr(innermost(teacher), "config", None)
        # encoder-decoder models make the decoder's inputs from the labels; a module of the user's may need them for its
        # own loss; other models of transformers save that loss without them
        self._needs_labels = config is None or bool(getattr(config, "is_encoder_decoder", False))
        self._switches = {"use_cache": False} if "use_cache" in signature.names else {}
        self._captures: tuple[Captures, Captures] | None = None
        self._of_encoder: frozenset[str] = frozenset()  # modules of the student in an encoder beside a decoder
        self._engine: Engine | None = None
        self._skips = False  # steps that are not finite are not applied
        self._strategy: SingleDevice | None = None
        self._shifts: bool | None = None  # of a loss of unknown reduction
        self._is_examined = False
        self._step = -1  # the engine's number of the window in progress
        self._index = -1  # of the last pass in it
        self._was_used = False
        self.cache: LogitSource | None = None
        self._window: list[tuple[Tensor, ...]] = []  # contributions of the passes of the window in progress
        self._pending: list[tuple[Tensor, ...]] = []  # those of complete windows
        self._sizes: list[int] = []  # passes of each of these windows
        self._sums = [0.0, 0.0, 0.0]
        self._num_steps = 0

    @property
    def names_of_inputs(self) -> tuple[str, ...]:
        """Returns the names of the inputs that the teacher takes."""
        return self._caller.signature.names

    # ---- the life of a run

    def begin(self, options: Options, strategy: SingleDevice) -> None:
        """Prepares for a run: reads the options, moves the teacher to the device, begins with new projections.

        Raises:
            UnsupportedOption: an option is not supported with a teacher, or the strategy splits a batch or a model in a
                way that the losses do not support.
        """
        check_with_teacher(options)
        self.settings = settings_of(options)  # they may have been set since the Trainer was made
        mesh_obstacle = not strategy.mesh.is_data_only or strategy.runs_windows or strategy.is_lazy
        if mesh_obstacle:
            raise UnsupportedOption(
                "A teacher with a model or sequences that are split over processes (tp, pp, cp, sp), or on XLA "
                "devices, is not supported: use one process, parallel='ddp' or 'fsdp', or leave the teacher out."
            )
        if self.settings.layers and strategy.precision.scales:
            raise UnsupportedOption(
                f"distillation_layers={self.settings.layers!r} with fp16=True, whose gradients are scaled, is not "
                "supported: set bf16=True."
            )
        if options.distillation_cache is None:
            self.teacher.to(strategy.device)
        self.cache = None
        self._strategy, self._was_used, self._step = strategy, False, -1
        self._shifts, self._is_examined = None, False
        self._window, self._pending, self._sizes = [], [], []
        self._sums, self._num_steps = [0.0, 0.0, 0.0], 0
        self.projections = Projections(self.projections.seed)

    def follow(self, engine: Engine) -> None:
        """Sets the engine whose passes the losses belong to."""
        self._engine, self._skips = engine, engine.skips_non_finite

    @contextmanager
    def applied(self, student: nn.Module, handler: CallbackHandler) -> Iterator[None]:
        """Puts the teacher into evaluation mode and follows the run's steps while entered."""
        names = dict(self.settings.layers)
        if names:
            self._captures = (
                Captures(student, list(names), "student"),
                Captures(self.teacher, list(dict.fromkeys(names.values())), "teacher"),
            )
            self._of_encoder = names_in_encoder(student, names)
        steps = DistillationSteps(self)
        handler.callbacks.insert(0, steps)
        try:
            with self.evaluating():
                yield
        finally:
            handler.pop_callback(steps)
            for capture in self._captures or ():
                capture.close()
            self._captures, self._engine = None, None

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Puts the teacher into evaluation mode while entered."""
        modes = {name: module.training for name, module in self.teacher.named_modules()}
        self.teacher.eval()
        try:
            yield
        finally:
            for name, module in self.teacher.named_modules():
                module.training = modes.get(name, module.training)

    def end_passes(self) -> None:
        """Checks that the loss of the teacher is part of the training, and averages the projections' gradients.

        Raises:
            UnsupportedOption: user code computes a loss without the teacher.
        """
        if not self._was_used:
            raise UnsupportedOption(
                "teacher: the overridden compute_loss or training_step computes its loss without the teacher: call "
                "super().compute_loss(...) there, whose loss is the mixed one, or leave the teacher out."
            )
        if self.projections.maps and self._strategy is not None:
            self.projections.average(self._strategy.world.world_size)

    # ---- the losses

    def is_unlabelled(self, inputs: object) -> bool:
        """Returns True if a batch has no labels, and needs none because only the soft loss counts."""
        return self.settings.alpha == 1 and self.normalizer.find_labels(inputs) is None

    def mix(self, hard: Tensor | None, outputs: Any, inputs: Any, num_items: Any) -> Tensor:
        """Returns the loss of a training pass.

        Args:
            hard: the loss without a teacher; None for unlabelled data.
            outputs: the outputs of the student.
            inputs: the batch, on the device.
            num_items: the count that the hard loss may be divided by.

        Raises:
            ValueError: the targets are of another kind than classes.
        """
        self._was_used = True
        if not isinstance(inputs, Mapping):
            raise ValueError("teacher: the batches hold no named inputs; let the dataset return dicts.")
        labels = self.labels_of(inputs)
        student = find_logits(outputs, labels, "student")
        with torch.no_grad():
            teacher = self._find_target(inputs, labels, student)
        if labels is None:
            reduction = LossReduction("samples")
            kept, shifts = torch.ones(len(student), dtype=torch.bool, device=student.device), False
        else:
            reduction = self._reduction_of(outputs, labels)
            kept, shifts = kept_items(labels, reduction, "shift_labels" in inputs)
        divisor = num_items if self.normalizer.is_scaled and num_items is not None else None
        soft = self._soft(student, teacher, kept, shifts, reduction, divisor)
        settings = self.settings
        hard = torch.zeros_like(soft) if hard is None else hard
        loss = (1 - settings.alpha) * hard + settings.alpha * soft
        hidden = torch.zeros_like(soft.detach())
        if self._captures is not None:
            hidden = self._hidden(kept, shifts, inputs, reduction, divisor)
            loss = loss + settings.layer_weight * hidden
        self._record(hard.detach(), soft.detach(), hidden.detach())
        return loss

    def labels_of(self, inputs: Mapping[str, Any]) -> Tensor | None:
        """Returns the targets of a batch; None for unlabelled data.

        Raises:
            ValueError: they are no classes, or there are several.
        """
        named = [name for name in self.normalizer.label_names if isinstance(inputs.get(name), Tensor)]
        if len(named) > 1:
            raise UnsupportedOption(
                f"teacher: the batches have several targets ({', '.join(named)}), and the soft loss is defined for "
                "one: name it in label_names=[...], or compute the soft loss in compute_loss_func."
            )
        labels = inputs["shift_labels"] if named and "shift_labels" in inputs else self.normalizer.find_labels(inputs)
        if labels is not None and labels.is_floating_point():
            raise UnsupportedOption(
                "teacher: the targets are floating-point numbers, and the soft loss compares probabilities of classes: "
                "leave the teacher out, or give integer classes."
            )
        return labels

    def _find_target(self, inputs: Mapping[str, Any], labels: Tensor | None, student: Tensor) -> Tensor | TopClasses:
        """Returns the teacher's logits for a batch, or its likeliest classes, from the cache if there is one.

        Raises:
            ValueError: the student has other classes.
        """
        engine = self._engine
        if self.cache is not None and engine is not None and engine.current is not None:
            return self.cache.find(inputs, labels, student, engine)
        self.teacher.to(student.device)
        with nullcontext() if self._engine is not None else self.evaluating():  # a run holds the modes
            teacher = self.ask(inputs, labels)
        check_classes(student, teacher)
        return teacher

    def ask(self, inputs: Mapping[str, Any], labels: Tensor | None) -> Tensor:
        """Returns the teacher's logits `(*labels.shape, num_classes)` for a batch.

        Raises:
            ModelOutputError: it returned none.
        """
        dropped = () if self._needs_labels else self.normalizer.label_names
        required = self._caller.signature.required
        rest = {name: value for name, value in inputs.items() if name not in dropped or name in required}
        return find_logits(self._caller.call(self.teacher, {**rest, **self._switches}), labels, "teacher")

    def _reduction_of(self, outputs: Any, labels: Tensor) -> LossReduction:
        """Returns the reduction of the hard loss: the known one, or that of a cross-entropy that equals it."""
        normalizer = self.normalizer
        if labels.dim() == 1 or normalizer.is_certain or normalizer.is_confirmed:
            return normalizer.reduction
        if not self._is_examined:
            self._is_examined = True
            self._shifts = LabelSmoother(0.0).find_shift(outputs, labels, normalizer.shifts)
        return normalizer.reduction if self._shifts is None else LossReduction("tokens", shifted=self._shifts)

    def _soft(
        self,
        student: Tensor,
        teacher: Tensor | TopClasses,
        kept: Tensor,
        shifts: bool,
        reduction: LossReduction,
        num_items: Any,
    ) -> Tensor:
        """Returns the soft loss, 0-dim."""
        settings = self.settings
        if shifts:
            student, teacher = student[:, :-1], teacher[:, :-1]
        if isinstance(teacher, Tensor) and settings.top_k is not None and settings.top_k < teacher.shape[-1]:
            teacher = top_classes(teacher, settings.top_k, settings.temperature)
        return reduce_items(divergence(student, teacher, settings.temperature), kept, reduction, num_items)

    def _hidden(
        self, kept: Tensor, shifts: bool, inputs: Mapping[str, Any], reduction: LossReduction, num_items: Any
    ) -> Tensor:
        """Returns the mean distance of the hidden states over the pairs of modules, 0-dim."""
        assert self._captures is not None
        student, teacher = self._captures
        targets = {name: teacher.take(name) for name in dict.fromkeys(self.settings.layers.values())}
        losses = []
        for name, other in self.settings.layers.items():
            states, target = student.take(name), targets[other].detach()
            if not states.requires_grad:
                raise ValueError(
                    f"distillation_layers: the output of {name!r} of the student has no gradient: it is frozen, or "
                    "checkpointed with use_reentrant=True. Name another module."
                )
            if states.shape[:-1] != target.shape[:-1]:
                raise ValueError(
                    f"distillation_layers: {name!r} has states of the shape {tuple(states.shape)} and {other!r} of "
                    f"{tuple(target.shape)}; only the width, the last, may differ."
                )
            distances = hidden_distance(
                self.projections.project(name, states, target.shape[-1]), target, self.settings.layer_loss
            )
            masks: Mapping[str, Any] = inputs
            if name in self._of_encoder:  # in a shape of their own, since the targets may have the same length
                distances, masks = distances.unsqueeze(-1), masks_of_encoder(inputs)
            losses.append(reduce_items(hidden_items(distances, kept, shifts, masks), kept, reduction, num_items))
        return torch.stack(losses).mean()

    # ---- the log

    def _record(self, *losses: Tensor) -> None:
        """Keeps the contributions of a pass to the losses of its step, on the device."""
        engine = self._engine
        current = engine.current if engine is not None else None
        if engine is None or current is None:  # called by user code, outside of a run
            return
        if engine.num_steps != self._step:
            self._close()
            self._step = engine.num_steps
        elif current.index <= self._index and not current.is_dummy:  # a window that is tried again
            self._window = []
            self.projections.clear()
        self._index = current.index
        total = engine.sync.total
        is_nothing = current.is_dummy or not total
        factor = 0.0 if is_nothing else engine.normalizer.factor(current.counts, total)
        self._window.append(tuple(loss * factor for loss in losses))

    def _close(self) -> None:
        """Ends a window."""
        self._sizes += [len(self._window)] if self._window else []
        self._pending += self._window
        self._window = []
        if len(self._pending) >= MOST_PENDING:
            self._read()

    def _read(self) -> None:
        """Adds up the contributions that wait on the device. Synchronizes with it."""
        (pending, sizes), self._pending, self._sizes = (self._pending, self._sizes), [], []
        values = iter(to_floats([loss for losses in pending for loss in losses]))
        for size in sizes:
            passes = [[next(values) for _ in LOSSES] for _ in range(size)]
            losses = list(map(sum, zip(*passes, strict=True)))
            if self._skips and not all(map(math.isfinite, losses)):  # left out of the log, as their step's loss is
                continue
            self._sums = [total + loss for total, loss in zip(self._sums, losses, strict=True)]
            self._num_steps += 1

    def row(self, times: Mapping[str, float]) -> dict[str, float]:
        """Returns the mean losses of the optimizer steps since the last row; collective.

        Args:
            times: seconds by activity since the last row.
        """
        self._close()
        self._read()
        assert self._strategy is not None
        *sums, steps = sum_floats(self._strategy.world, [*self._sums, self._num_steps])
        self._sums, self._num_steps = [0.0, 0.0, 0.0], 0
        if not steps:
            return {}
        names = LOSSES if self.settings.layers else LOSSES[:2]
        return {name: value / steps for name, value in zip(names, sums, strict=False)}

    def describe(self) -> str:
        """Returns an empty text: the losses are in the log."""
        return ""

    def share(self) -> None:
        """Averages the losses since the last row over the processes, before a checkpoint; collective."""
        self._close()
        self._read()
        assert self._strategy is not None
        world = self._strategy.world
        self._sums = [value / world.world_size for value in sum_floats(world, self._sums)]

    # ---- an item of checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns the projections, and the losses since the last row."""
        self._close()
        self._read()
        return {"projections": self.projections.state_dict(), "sums": list(self._sums), "steps": self._num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the projections and the losses since the last row."""
        self._window, self._pending, self._sizes = [], [], []
        self._step = -1
        self.projections.load_state_dict(state["projections"])
        self._sums, self._num_steps = [float(value) for value in state["sums"]], int(state["steps"])


def make_distillation(
    given: object,
    options: Options,
    *,
    student: nn.Module,
    normalizer: LossNormalizer,
    tokenizer: object,
) -> Distillation | None:
    """Returns the distillation of a Trainer; None without a teacher.

    Args:
        given: the Trainer's argument `teacher`: a module, a folder, or None.
        options: the arguments.
        student: the model.
        normalizer: the loss normalizer of the hard loss.
        tokenizer: `processing_class`.

    Raises:
        ValueError: the teacher cannot teach the student, or an option belongs to a teacher and there is none.
        UnsupportedOption: an option is not supported with a teacher.
    """
    option = options.teacher
    teacher = find_teacher(given, option)
    if teacher is None:
        check_without_teacher(options)
        return None
    check_with_teacher(options)
    folder = given if option is None else option
    check_teacher(teacher, student, tokenizer, None if isinstance(folder, nn.Module) else folder)
    return Distillation(teacher, settings_of(options), normalizer, options.seed)
