"""A pipeline of which one process exists: its stages run as in training, and nothing arrives from the others."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import schedules

from paceline.args.sections import Options
from paceline.core.optional import LateModule
from paceline.pytorch.distributed.activation_meta import ActivationMeta, Signature, signature_of
from paceline.pytorch.distributed.memory_report import tensors_of
from paceline.pytorch.distributed.pipeline import Layout, MakeLoss, Pipelined, RunStage
from paceline.pytorch.distributed.precision import Precision
from paceline.pytorch.distributed.stages import Stage
from paceline.pytorch.distributed.world import World
from paceline.pytorch.forecast.rehearsal import fake_batch, fake_tensor
from paceline.pytorch.forecast.replaced import replaced

pipelining: Any = LateModule("torch.distributed.pipelining._utils")


class PipelineAlone(Pipelined):
    """Runs the stages of one process on tensors without data.

    Args:
        world: this process.
        precision, args: as for `Pipelined`.
        handed: by the signature of a micro-batch, what each stage except the last hands on.
    """

    def __init__(
        self, world: World, precision: Precision, args: Options, handed: Mapping[Signature, list[ActivationMeta]]
    ) -> None:
        super().__init__(world, precision, args)
        self.layout = Layout(number=self.size * self.settings.stages_per_process)
        self._known = handed

    @property
    def stages(self) -> list[Any]:
        """Returns torch's stages of this process; empty before the first window."""
        schedule = self._schedule
        return [] if schedule is None else getattr(schedule, "_stages", None) or [schedule._stage]

    @property
    def counted(self) -> list[nn.Parameter]:
        """Returns the parameters of this process whose state it contributes to a checkpoint."""
        return self._counted

    def receive_buffers(self) -> list[Tensor]:
        """Returns the tensors that this process receives into, which it keeps from step to step."""
        tables = [table for stage in self.stages for table in (stage.args_recv_info, stage.grad_recv_info)]
        found = [entry.buffer for table in tables for row in table.values() for entry in row]
        return [buffer for buffer in found if buffer is not None]

    def run_own_stages(self, batch: Mapping[str, Any], make_loss: Callable[[Mapping[str, Any]], object]) -> None:
        """Runs the forward pass of this process's stages, on inputs of the shapes that they receive.

        Args:
            batch: the micro-batch.
            make_loss: computes the loss of the batch, on the process with the last stage.
        """
        handed = self._known[signature_of(batch)]
        for place, stage in self.layout.stages.items():
            received: tuple[Tensor, ...] = ()
            if place > 0:
                each = handed[place - 1]
                flat = torch.empty(each.numel, dtype=each.dtype, device=self.device, requires_grad=True)
                received = each.unpack(flat)
            if stage.is_last:
                self.last.expect(batch)
                self.last.receive(received)
                make_loss(batch)
                continue
            with self.forward_context():
                stage(received, batch)

    def run_schedule(self, batches: list[Mapping[str, Any]], make_loss: MakeLoss) -> None:
        """Runs the forward and backward passes of micro-batches; what is sent goes nowhere."""
        with replaced(schedules, "_batch_p2p", hold):
            super().run_schedule(batches, make_loss)

    def _shapes(self, batches: Sequence[Mapping[str, Any]]) -> list[list[ActivationMeta]]:
        return [self._known[signature_of(batch)] for batch in batches]

    def _average(self) -> None:
        """Does nothing: gradients are averaged over the pipelines in place."""

    def _schedule_for(self, number: int, lengths: list[int], handed: list[ActivationMeta]) -> Any:
        before = self._schedule
        schedule = super()._schedule_for(number, lengths, handed)
        if schedule is not before:
            schedule._warmup_p2p = assume_known_shapes
            for stage in self.stages:
                stage.submod.register_forward_pre_hook(NumberedInOrder(number), with_kwargs=True)
        return schedule


class NumberedInOrder:
    """Replaces the index of a micro-batch, which has no value on tensors without data.

    Every schedule runs the forward passes of a stage in the order of the micro-batches.

    Args:
        number: micro-batches of a window.
    """

    def __init__(self, number: int) -> None:
        self._indices = itertools.cycle(range(number))

    def __call__(self, module: RunStage, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        index = next(self._indices)
        return ((index,), {}) if module.stage.index == 0 else (args, {"index": index})


class Sent:
    """A tensor on its way, which is kept as by the work of a process group until the schedule drops it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def wait(self) -> None:
        """Returns at once."""


def hold(operations: Sequence[Any], desc: str | None = None) -> list[Sent]:
    """Stands for sending and receiving the tensors of some operations."""
    return [Sent(operation.tensor) for operation in operations]


def assume_known_shapes(stages: Sequence[Any], *_: object) -> None:
    """Stands for the vote of all stages on whether their shapes are given, which they are."""
    for stage in stages:
        stage._inference_mode = pipelining.InferenceMode.STATIC


def find_handed(
    model: nn.Module, stages: Sequence[Stage], batches: Sequence[Mapping[str, Any]], strategy: Pipelined
) -> dict[Signature, list[ActivationMeta]]:
    """Returns what each stage except the last hands on, for each signature of a micro-batch.

    Copies of the stages run on tensors without data, in evaluation mode, as `Pipelined` finds the shapes.

    Args:
        model: the model.
        stages: all of its stages.
        batches: the micro-batches.
        strategy: gives the device and the precision.
    """
    found: dict[Signature, list[ActivationMeta]] = {}
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad(), strategy.forward_context():
        tensors = itertools.chain(tensors_of(model), *map(tensors_of, stages))
        twins = copy.deepcopy(list(stages), {id(tensor): mode.from_tensor(tensor) for tensor in tensors})
        for signature, batch in {signature_of(batch): batch for batch in batches}.items():
            fake = fake_batch(batch, mode, strategy.device)
            received: tuple[Tensor, ...] = ()
            found[signature] = []
            for stage in twins[:-1]:
                received = stage.hand_on(stage.eval()(received, fake))
                shapes = tuple(tensor.shape for tensor in received)
                found[signature].append(ActivationMeta(shapes, received[0].dtype))
    return found
