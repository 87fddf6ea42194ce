"""Pipeline parallelism: each process holds some of a model's layers, through which micro-batches pass one by one.

Schedules of torch.distributed.pipelining run the forward and backward passes of all micro-batches of an optimizer step.
Each stage sends one flat buffer per micro-batch to the next. Between two stages all buffers of an optimizer step have
the length of the longest, so that micro-batches of different shapes share a schedule.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.optim import Optimizer

from paceline.args.mesh import resolve_mesh
from paceline.args.pipelining import read_pipelining
from paceline.pytorch.distributed.activation_meta import ActivationMeta, Signature, signature_of
from paceline.pytorch.distributed.broadcast_init import spread, spread_saved_buffers
from paceline.pytorch.distributed.collectives import portable
from paceline.pytorch.distributed.device_mesh import build_device_mesh
from paceline.pytorch.distributed.last_stage import LastStage, Looking
from paceline.pytorch.distributed.pipeline_window import WindowLosses, check_options, check_own
from paceline.pytorch.distributed.stages import Stage, make_stages, owners_of
from paceline.pytorch.distributed.strategy import Prepared, SingleDevice
from paceline.pytorch.distributed.window import Pass, PassRunner
from paceline.pytorch.model.loss import LossNormalizer
from paceline.pytorch.model.objective import compute_loss_with_outputs
from paceline.pytorch.model.tensor_parts import differing_names, map_tensors

logger = logging.getLogger(__name__)

KINDS: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
}
MakeLoss = Callable[[int], Tensor]
Made = TypeVar("Made")


@dataclass
class ScheduledWindow:
    """The micro-batches of a window that is passing through the stages.

    Attributes:
        batches: the micro-batches, on the device.
        handed: for each micro-batch, the output shapes and dtype of each stage except the last.
        lengths: elements of the buffer after each stage except the last.
        make_loss: `(index) -> weighted loss` of a micro-batch, called on the process with the last stage.
    """

    batches: list[Mapping[str, Any]]
    handed: list[list[ActivationMeta]]
    lengths: list[int]
    make_loss: MakeLoss


class RunStage(nn.Module):
    """The stage module that a schedule calls, with the index of its micro-batch."""

    def __init__(self, strategy: Pipelined, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        self.strategy = strategy

    def forward(self, *received: Tensor, index: Tensor | None = None) -> Tensor:
        """Runs the stage. `received` is the index for the first stage, else a buffer with the index in `index`."""
        place = self.stage.index
        number = int(received[0] if place == 0 else index)  # type: ignore[arg-type]
        window = self.strategy.window
        assert window is not None
        handed = window.handed[number]
        tensors = handed[place - 1].unpack(received[0]) if place > 0 else ()
        if self.stage.is_last:
            self.strategy.last.receive(tensors)
            return window.make_loss(number)
        with self.strategy.forward_context():
            outputs = self.stage.hand_on(self.stage(tensors, window.batches[number]))
        found = ActivationMeta(tuple(output.shape for output in outputs), outputs[0].dtype)
        if found != handed[place]:
            raise ValueError(
                f"Stage {place} of {self.stage.number} handed on {found.shapes} in {found.dtype} in training, and "
                f"{handed[place].shapes} in {handed[place].dtype} in evaluation mode, for inputs of the same shapes: "
                "what a stage hands on must depend on the shapes of its inputs only."
            )
        return handed[place].pack(outputs, window.lengths[place])


@dataclass
class Layout:
    """The stages of a model and the processes that hold them.

    Attributes:
        stages: the stages of this process, by index.
        number: number of all stages.
        owners: indices of the stages that hold each parameter and buffer, by name.
    """

    stages: dict[int, Stage] = field(default_factory=dict)
    number: int = 0
    owners: dict[str, list[int]] = field(default_factory=dict)


class Pipelined(SingleDevice):
    """Runs a model as pipeline stages (Huang et al., 2019, arXiv:1811.06965; Narayanan et al., 2021, arXiv:2104.04473).

    The model keeps its structure on every process. Parameters of other processes' stages have no values (device
    "meta"), and the optimizer skips them, since they have no gradient.

    Args:
        world, precision: as for `SingleDevice`.
        args: `pipeline_config` is read.

    Raises:
        UnsupportedOption: fp16, evaluation in 16 bits, generation in evaluation, a loss without logits, sharded
            checkpoints, optim='auto', a model compiled as a whole, or a mesh with axes other than `pp` and
            `dp_replicate`.
    """

    is_sharded = True
    runs_windows = True

    def __init__(self, world: Any, precision: Any, args: Any) -> None:
        super().__init__(world, precision, resolve_mesh(args, world.world_size, world.local_size))
        check_options(self.mesh, precision, args)
        self.settings = read_pipelining(args.pipeline_config)
        self.size = self.mesh.pp
        self.rank = self.mesh.coordinates(world.process_index)["pp"]
        self.group: Any = None  # the process group of this pipeline; None: all processes
        self.data_group: Any = None  # the process group of the same stages in all pipelines
        self.layout = Layout()
        self.window: ScheduledWindow | None = None
        self.last: Any = None
        self._schedule: Any = None
        self._schedule_key: Any = None
        self._handed: dict[Signature, list[ActivationMeta]] = {}
        self._seen: list[tuple[int, ActivationMeta]] = []  # outputs of the last forward pass, by stage
        self._counted: list[nn.Parameter] = []  # parameters whose gradients this process adds to the norm
        self._tied: list[tuple[nn.Parameter, bool]] = []  # held by several processes; True if by this process too
        self._loss: Tensor | None = None

    # ---- location of stages

    def process_of(self, stage: int) -> int:
        """Returns the global rank of this pipeline's process that holds a stage."""
        each = self.world.world_size // self.size
        return stage % self.size * each + self.world.process_index % each

    def is_here(self, stage: int) -> bool:
        """True if this process holds the stage."""
        return stage % self.size == self.rank

    @property
    def is_last(self) -> bool:
        """True if this process holds the last stage, and so computes losses and predictions."""
        return self.rank == self.size - 1

    def prepare(self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer] | None) -> Prepared:
        """Splits the model, and makes its optimizer over all parameters; only this process's parameters have values."""
        self.cut(model)
        return super().prepare(model, make_optimizer)

    def cut(self, model: nn.Module) -> None:
        """Builds the stages of this process, and frees the parameters of other stages.

        Raises:
            ValueError: the model offers no stages, or it was split in another way before.
        """
        if self.mesh.dp_replicate > 1 and self.group is None:
            whole = build_device_mesh(self.mesh, self.device.type)
            self.group, self.data_group = whole["pp"].get_group(), whole["dp_replicate"].get_group()
        if not self.holds_part_of(model):
            spread(model, self.device)
        number = self.size * self.settings.stages_per_process
        stages = make_stages(model, number)
        own = {stage.index: stage for stage in stages if self.is_here(stage.index)}
        self.layout = Layout(own, number, owners_of(model, stages))
        self.last = LastStage(model, own, self.forward)
        parameters = {id(p): p for stage in own.values() for p in stage.parameters()}
        gone = [name for name, p in model.named_parameters() if id(p) in parameters and p.is_meta]
        if gone:
            raise ValueError(
                f"The values of {gone[0]!r} are not on process {self.world.process_index}: the model was cut into "
                "other stages before. Make the model anew."
            )
        for parameter in list(model.parameters()):
            if id(parameter) not in parameters and not parameter.is_meta:
                empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
                parameter.grad = None
                torch.utils.swap_tensors(parameter, empty)  # type: ignore[no-untyped-call]
        self._schedule_key = None
        self._handed.clear()
        self._sort(model)
        logger.info(
            "Stages %s of %d are here, with %s of %s parameters; schedule %s.",
            ", ".join(map(str, own)),
            number,
            f"{sum(p.numel() for p in parameters.values()):,}",
            f"{sum(p.numel() for p in model.parameters()):,}",
            self.settings.schedule,
        )

    def evaluation_model(self, model: nn.Module) -> nn.Module:
        """Returns the module to call in evaluation, which returns outputs on the process with the last stage.

        It has the buffers of the first pipeline.
        """
        if self.last is None or self.last.whole is not self.unwrap(model):
            self.cut(self.unwrap(model))
        if self.data_group is not None:
            each = self.mesh.dp_replicate
            first = self.world.process_index // each * each
            spread_saved_buffers(self.last.parts, self.device, first, self.data_group)
        last: nn.Module = self.last
        return last

    # ---- one optimizer step

    @property
    def min_micro_batches(self) -> int:  # type: ignore[override]
        """Returns the number of micro-batches that the schedule requires."""
        return max(self.settings.micro_batches, self.layout.number)

    def divide(self, batches: Sequence[Any], split: Callable[[Sequence[Any], int], list[Any]]) -> list[Any]:
        """Splits the samples into at least as many micro-batches as the schedule needs, if there are enough samples.

        Args:
            batches: the micro-batches of one optimizer step.
            split: `(batches, samples) -> batches` of at most that many samples.
        """
        wanted = self.min_micro_batches
        sizes = [next((len(v) for v in batch.values() if isinstance(v, Tensor) and v.dim()), 1) for batch in batches]
        each = -(-wanted // len(batches))
        return split(batches, max(1, -(-max(sizes) // each)))

    def check_training_step(self, training_step: Callable[..., Tensor]) -> None:
        """Refuses an overridden `training_step`, since the schedule interleaves forward and backward passes."""
        check_own(training_step)

    def run_window(self, engine: PassRunner, passes: list[Pass]) -> list[Tensor]:
        """Runs the forward and backward passes of a window, in the order of the schedule.

        The process with the last stage computes the losses with the Trainer's own methods.

        Returns:
            The contributions to the window's loss, on all processes.
        """
        if not (self.last.training and self.last.whole.training):  # also on processes that compute no losses
            engine.enter_training(self.last)
        # before the schedule runs, which fixes the weights of the micro-batches
        passes = engine.look_ahead(passes, self.last, self.loss_of)
        losses = WindowLosses(engine, passes, self.last, self.take_loss)
        self.run_schedule(losses.batches, losses.make)
        for _ in range(engine.num_micro_steps - 1):
            engine.end_pass(None)
        if not losses.weighing:
            return [torch.zeros((), device=self.device)]
        return self.share_losses(losses.found(), len(losses.weighing))

    def loss_of(
        self, compute_loss: Callable[..., Any], normalizer: LossNormalizer, inputs: Any, num_items: object
    ) -> Tensor | None:
        """Returns the loss of a batch on all processes, computed through the stages without gradients.

        Raises: the error of `compute_loss`, on all processes.
        """

        def compute() -> tuple[float, torch.dtype, bool] | None:
            with self.forward_context():
                loss, _ = compute_loss_with_outputs(compute_loss, self.last, inputs, num_items)
            return None if loss is None else (float(loss.detach().mean()), loss.dtype, normalizer.passes_count)

        found = self.from_last(inputs, compute)
        if found is None:
            return None
        value, dtype, normalizer.passes_count = found
        return torch.tensor(value, dtype=dtype)

    def from_last(self, batch: Any, compute: Callable[[], Made]) -> Made:
        """Returns on all processes what the one with the last stage computes for a batch, without gradients.

        The batch passes through the stages before. So an error of `compute` leaves no process waiting.

        Args:
            batch: on the device; the same on all processes of the pipeline.
            compute: called on the process with the last stage; may call the model once.

        Raises: the error of `compute`: unchanged on that process, as `portable` returns it on the others.
        """
        made, error = None, None
        with self.looking():
            received = self.forward(batch, tuple)
            if self.is_last:
                self.last.expect(batch)
                self.last.receive(received)
                try:
                    made = compute()
                except Exception as raised:
                    error = raised
        made, told = self.share_from_last((made, None if error is None else portable(error)))
        if error is not None or told is not None:
            raise error or told
        return made  # type: ignore[no-any-return]

    def run_schedule(self, batches: list[Mapping[str, Any]], make_loss: MakeLoss) -> None:
        """Runs the forward and backward passes of micro-batches.

        Args:
            batches: on the device; the same on all processes of a pipeline.
            make_loss: `(index) -> loss`, called on the process with the last stage in the schedule's order. If the
                schedule needs more micro-batches than there are, indices beyond them have weight 0.
        """
        if self.optimizer is not None:
            self._follow(self.optimizer, clears=True)
        number = self._wanted(len(batches))
        handed = self._shapes(batches)
        handed += handed[:1] * (number - len(batches))
        lengths = [max(each[place].numel for each in handed) for place in range(self.layout.number - 1)]
        self.window = ScheduledWindow([*batches, *batches[:1] * (number - len(batches))], handed, lengths, make_loss)
        schedule = self._schedule_for(number, lengths, handed[0])
        numbers = torch.arange(number)
        try:
            if 0 in self.layout.stages:
                schedule.step(numbers, return_outputs=False, **self._targets(numbers))
            else:
                schedule.step(index=numbers, return_outputs=False, **self._targets(numbers))
        finally:
            self.window = None
        self._sum_tied()
        self._average()

    def _targets(self, numbers: Tensor) -> dict[str, Tensor]:
        """Returns the targets that a schedule requires for a loss, although the last stage itself computes the loss."""
        targets = {"target": numbers} if self.is_last else {}
        if 0 in self.layout.stages and len(self.layout.stages) > 1:
            targets["index"] = numbers  # for the later stages of this process
        return targets

    def _wanted(self, number: int) -> int:
        """Returns the number of micro-batches that the schedule can run, at least `number`."""
        if self.settings.schedule == "gpipe":
            return number
        number = max(number, self.layout.number)
        if self.settings.schedule == "interleaved_1f1b":
            number = -(-number // self.size) * self.size
        return number

    def _schedule_for(self, number: int, lengths: list[int], handed: list[ActivationMeta]) -> Any:
        """Returns a schedule for `number` micro-batches with buffers of these lengths."""
        key = (number, tuple(lengths), tuple(each.dtype for each in handed))
        if key == self._schedule_key:
            return self._schedule
        buffers = [
            torch.empty(length, dtype=each.dtype, device="meta", requires_grad=True)
            for length, each in zip(lengths, handed, strict=True)
        ]
        loss = torch.empty((), device="meta", requires_grad=True)
        stages = [
            PipelineStage(
                RunStage(self, stage),
                place,
                self.layout.number,
                self.device,
                input_args=buffers[place - 1] if place > 0 else torch.empty(1, dtype=torch.int64, device="meta"),
                output_args=loss if stage.is_last else buffers[place],
                group=self.group,
            )
            for place, stage in self.layout.stages.items()
        ]
        kind = KINDS[self.settings.schedule]
        given: Any = stages if self.settings.schedule == "interleaved_1f1b" else stages[0]
        self._schedule = kind(given, n_microbatches=number, loss_fn=first_of, scale_grads=False)
        self._schedule_key = key
        return self._schedule

    def _shapes(self, batches: Sequence[Mapping[str, Any]]) -> list[list[ActivationMeta]]:
        """Returns the stages' output shapes for each micro-batch, cached by the shapes of its tensors.

        A batch with new shapes runs through the stages once, without gradients.
        """
        signatures = [signature_of(batch) for batch in batches]
        for signature, batch in zip(signatures, batches, strict=True):
            if signature not in self._handed:
                with self.looking():
                    self.forward(batch, None)
                known = dict(pair for pairs in self._gather(self._seen) for pair in pairs)
                self._handed[signature] = [known[place] for place in range(self.layout.number - 1)]
        return [self._handed[signature] for signature in signatures]

    def looking(self) -> Any:
        """Returns a context for a forward pass in evaluation mode, without gradients; random state is restored."""
        return Looking(self.last, self.device)

    def forward(self, batch: Mapping[str, Any], finish: Callable[[tuple[Tensor, ...]], Any] | None) -> Any:
        """Runs one batch through all stages, forward only; each process runs its own stages.

        Args:
            batch: on the device; the same on all processes of the pipeline.
            finish: computes the result from the last stage's input, on the process with the last stage; None skips the
                last stage.

        Returns: the result of `finish` on the process with the last stage; None on others.
        """
        received: tuple[Tensor, ...] = ()
        result = None
        self._seen = seen = list[tuple[int, ActivationMeta]]()
        for place in range(self.layout.number):
            stage = self.layout.stages.get(place)
            if stage is None:
                continue
            if place > 0 and self.size > 1:
                received = self._receive(place)
            if stage.is_last:
                result = finish(received) if finish is not None else None
                continue
            with self.forward_context():
                tensors = stage.hand_on(stage(received, batch))
            handed = ActivationMeta(tuple(tensor.shape for tensor in tensors), tensors[0].dtype)
            seen.append((place, handed))
            self._send(place, handed, tensors)
        return result

    def _send(self, place: int, handed: ActivationMeta, tensors: Sequence[Tensor]) -> None:
        peer = self.process_of(place + 1)
        distributed.send_object_list([handed], dst=peer, group=self.group)
        distributed.send(handed.pack(tensors, handed.numel).contiguous(), dst=peer, group=self.group)

    def _receive(self, place: int) -> tuple[Tensor, ...]:
        peer = self.process_of(place - 1)
        holder: list[Any] = [None]
        distributed.recv_object_list(holder, src=peer, group=self.group)
        flat = torch.empty(holder[0].numel, dtype=holder[0].dtype, device=self.device)
        distributed.recv(flat, src=peer, group=self.group)
        tensors: tuple[Tensor, ...] = holder[0].unpack(flat)
        return tensors

    def _gather(self, value: object) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        distributed.all_gather_object(gathered, value, group=self.group)
        return gathered

    def share_from_last(self, value: object) -> Any:
        """Broadcasts an object from the process with the last stage to the pipeline."""
        holder = [value]
        distributed.broadcast_object_list(holder, src=self.process_of(self.layout.number - 1), group=self.group)
        return holder[0]

    def share_losses(self, losses: Sequence[Tensor], number: int) -> list[Tensor]:
        """Broadcasts the losses of an optimizer step to all processes of the pipeline.

        Returns:
            `number` losses, 0-dim, on the device.
        """
        if self.is_last:
            stacked = torch.stack([loss.detach().float() for loss in losses])
        else:
            stacked = torch.empty(number, device=self.device)
        distributed.broadcast(stacked, src=self.process_of(self.layout.number - 1), group=self.group)
        return list(stacked.unbind())

    def backward(self, loss: Tensor) -> None:
        """Stores the weighted loss of the micro-batch for the schedule, which runs the backward pass.

        Raises:
            RuntimeError: called outside of an optimizer step.
        """
        if self.window is None:
            raise RuntimeError("With a pipeline, backward is called by its schedule only: leave the call out.")
        self._loss = loss

    def take_loss(self) -> Tensor:
        """Returns the loss of the latest call of `backward`."""
        loss, self._loss = self._loss, None
        assert loss is not None
        return loss

    def _sort(self, model: nn.Module) -> None:
        """Finds the parameters that this process counts in the norm, and those that several processes hold."""
        self._counted, self._tied = [], []
        for name, parameter in model.named_parameters():
            holders = [stage % self.size for stage in self.layout.owners[name]]
            if holders[0] == self.rank:
                self._counted.append(parameter)
            if len(set(holders)) > 1:
                self._tied.append((parameter, self.rank in holders))

    def _sum_tied(self) -> None:
        """Sums the gradients of trained parameters that several processes hold."""
        for parameter, is_here in (each for each in self._tied if each[0].requires_grad):
            value = parameter.grad if is_here else None
            if value is None:
                value = torch.zeros(parameter.shape, dtype=parameter.dtype, device=self.device)
            distributed.all_reduce(value, group=self.group)
            if is_here:
                parameter.grad = value

    def _average(self) -> None:
        """Averages the gradients of this process's stages over all pipelines.

        A parameter that has no gradient in any pipeline stays without one.
        """
        if self.data_group is None:
            return
        own = [parameter for parameter in self.parameters if parameter.requires_grad and not parameter.is_meta]
        has_one = torch.tensor([parameter.grad is not None for parameter in own], device=self.device).float()
        distributed.all_reduce(has_one, group=self.data_group)
        works = []
        for parameter, number in zip(own, has_one.tolist(), strict=True):
            if number:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                works.append(distributed.all_reduce(parameter.grad, group=self.data_group, async_op=True))
        for work in works:
            work.wait()
        torch._foreach_div_([p.grad for p in own if p.grad is not None], float(self.mesh.dp_replicate))

    def clip(self, max_norm: float) -> Tensor | None:
        """Clips the gradients to a total 2-norm of `max_norm` over all stages; returns the norm before clipping."""
        if max_norm <= 0:
            return None
        counted = [parameter.grad for parameter in self._counted if parameter.grad is not None]
        square = torch.zeros((), device=self.device)
        if counted:
            square = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(counted, 2.0)).float()).square()
        distributed.all_reduce(square, group=self.group)
        norm = square.sqrt()
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if gradients and max_norm < math.inf:
            torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp_(max=1.0))
        return norm

    # ---- contents of a checkpoint

    def holds_part_of(self, model: nn.Module) -> bool:
        """True if some of a model's parameters have no values on this process."""
        return any(parameter.is_meta for parameter in model.parameters())

    def whole_tensor(self, name: str, value: Tensor) -> Tensor:
        """Returns a value of the model on the host of all processes, broadcast from the stage that holds it."""
        if not self.layout.owners:  # the model is whole on each process
            return value.detach().cpu().clone()
        stage = self.layout.owners.get(name, [0])[0]
        if self.is_here(stage):
            sent = value.detach().to(self.device).contiguous().clone()
        else:
            sent = torch.empty(value.shape, dtype=value.dtype, device=self.device)
        distributed.broadcast(sent, src=self.process_of(stage), group=self.group)
        return sent.cpu()

    def full_state(self, state: Any) -> Any:
        """Returns the optimizer's state, merged over all stages, on the host. Collective."""
        own = map_tensors(lambda tensor: tensor.detach().cpu(), state["state"])
        merged: dict[Any, Any] = {}
        for part in self._gather(own):
            for key, values in part.items():
                merged.setdefault(key, values)
        return {**state, "state": {key: merged[key] for key in sorted(merged)}}

    def load_full(self, model: nn.Module, weights: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
        """Loads the values of this process's stages; returns the missing names, and the unexpected ones."""
        own = model.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, value in weights.items():
                if name in own and isinstance(own[name], Tensor) and not own[name].is_meta:
                    own[name].copy_(value)
        return differing_names(own, weights)

    def shard_state(self, optimizer: Optimizer) -> None:
        """Drops the state that belongs to other processes' stages."""
        for parameter in [parameter for parameter in optimizer.state if parameter.is_meta]:
            del optimizer.state[parameter]


def first_of(output: Tensor, target: Tensor) -> Tensor:
    """Returns the loss, which is the last stage's output."""
    return output
