"""A module that holds several members: their trainable parameters are stacked, what they share is stored once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _NormBase

from paceline.args.errors import UnsupportedOption

LossOf = Callable[[Any, Any, Any], Tensor]  # (callable model, inputs, num_items) -> loss, 0-dim

REMEDY = "Give MembersTrainer(vectorize=False), which runs the members one after another in each step."


class Losses(torch.autograd.Function):
    """The mean of the members' losses, whose gradient for each member is that of its own loss.

    Members that have stopped, or whose loss is not finite, do not count in the mean, unless no other is left. In the
    backward pass, the loss of each member times the factor of the micro-batch is added to `sums`.
    """

    @staticmethod
    def forward(ctx: Any, losses: Tensor, active: Tensor, sums: Tensor) -> Tensor:
        """Returns the mean, 0-dim.

        Args:
            ctx: the context of the backward pass.
            losses: `(members,)`.
            active: `(members,)`, 1 for members in training, and 0 for those that have stopped.
            sums: `(members,)`, to which the backward pass adds.
        """
        ctx.losses, ctx.active, ctx.sums = losses.detach(), active, sums
        counts = losses.isfinite() * active
        number = counts.sum()
        mean = torch.where(counts > 0, losses, 0).sum() / number
        return torch.where(number > 0, mean, losses.mean())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Returns the factor of the micro-batch for each member in training."""
        ctx.sums.add_(ctx.losses * gradients[0])
        return gradients[0] * ctx.active, None, None


class Slice:
    """One member as a callable: the shared module with the member's own parameters and buffers.

    Args:
        module: the shared module.
        tensors: the member's tensors by name.
    """

    def __init__(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        self.module, self.tensors = module, tensors

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the outputs of the member."""
        own = dict(self.tensors)
        outputs = functional_call(self.module, own, args, kwargs)  # type: ignore[arg-type]
        for name, tensor in self.tensors.items():
            if own[name] is not tensor:  # the module has assigned another tensor to the name of a buffer
                with torch.no_grad():
                    tensor.copy_(own[name])
        return outputs

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the module, such as its config."""
        return getattr(self.module, name)


class MemberStack(nn.Module):
    """Several members of one architecture.

    The shared module is the first member, with each trainable parameter replaced by one of shape `(members, ...)` and
    the same name. Buffers that differ, and statistics of normalization layers, are stacked too; all buffers if members
    are called one after another, since each may change its own. Frozen parameters must be equal in all members and are
    stored once.

    Args:
        members: modules of the same architecture; the first one is changed.
        vectorize: False calls the members one after another.

    Attributes:
        module: the shared module; its `forward` is called with the tensors of one member at a time.
        num_members: number of members.
        loss_of: `(callable model, inputs, num_items) -> loss` of one member; set by the Trainer.
        active: `(members,)`, 1 for members in training, and 0 for those that have stopped.
        sums: `(members,)`, the sum of the losses since it was last set to zero.
        per_member: batches hold each member's own samples, as `(samples, members, ...)`.

    Raises:
        UnsupportedOption: the members differ in their architecture or in a frozen parameter.
    """

    active: Tensor
    sums: Tensor

    def __init__(self, members: Sequence[nn.Module], vectorize: bool = True) -> None:
        super().__init__()
        self.num_members = len(members)
        self.vectorize = vectorize
        self.per_member = False
        self.loss_of: LossOf | None = None
        self._noted: Tensor | None = None
        check_alike(members)
        first = members[0]
        buffers = stacked_buffers(members) if vectorize else [name for name, _ in first.named_buffers()]
        tensors = {name: torch.stack([each.get_buffer(name) for each in members]) for name in buffers}
        parameters: dict[int, nn.Parameter] = {}
        for name, parameter in first.named_parameters():
            if parameter.requires_grad:
                own = [each.get_parameter(name).detach() for each in members]
                parameters[id(parameter)] = nn.Parameter(torch.stack(own))
        replace_parameters(first, parameters)
        for name, value in tensors.items():
            owner, _, leaf = name.rpartition(".")
            first.get_submodule(owner)._buffers[leaf] = value
        self.module = first
        self._places = places_of(first, tuple(tensors))
        device = next(first.parameters()).device
        self.register_buffer("active", torch.ones(self.num_members, device=device), persistent=False)
        self.register_buffer("sums", torch.zeros(self.num_members, device=device), persistent=False)

    def compute_with(self, loss_of: LossOf) -> None:
        """Sets the function that computes the loss of a member."""
        self.loss_of = loss_of

    def note_sums(self) -> None:
        """Notes `sums` before an optimizer step; they are put back if its passes run again (out of memory)."""
        self._noted = self.sums.clone()

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Calls the members one after another for a while."""
        before, self.vectorize = self.vectorize, False
        try:
            yield
        finally:
            self.vectorize = before

    def stacked(self) -> dict[str, Tensor]:
        """Returns the stacked parameters and buffers by name."""
        found: dict[str, Tensor] = {name: held[leaf] for name, held, leaf in self._places}
        return found

    def forward(self, inputs: object, num_items: object = None) -> Tensor:
        """Returns the mean loss of the members, 0-dim; its gradient for each member is that of its own loss.

        Args:
            inputs: a batch, as the members take it; `(samples, members, ...)` if each has its own samples.
            num_items: the number of targets of the optimizer step, or one per member.
        """
        if self._noted is not None and all(parameter.grad is None for parameter in self.parameters()):
            self.sums.copy_(self._noted)
        loss: Tensor = Losses.apply(self.losses(inputs, num_items), self.active, self.sums)  # type: ignore[no-untyped-call]
        return loss

    def losses(self, inputs: object, num_items: object = None) -> Tensor:
        """Returns the loss of each member, `(members,)`."""
        assert self.loss_of is not None
        loss_of, module, tensors = self.loss_of, self.module, self.stacked()
        if not self.vectorize:
            return torch.stack(
                [loss_of(Slice(module, own), batch, num_items) for own, batch in self.parts(tensors, inputs)]
            )

        def one(own: dict[str, Tensor], batch: object) -> Tensor:
            return loss_of(Slice(module, own), batch, num_items)

        batch_axis = axes_of(inputs) if self.per_member else None
        losses: Tensor = vmap(one, in_dims=(0, batch_axis), randomness="different")(tensors, inputs)
        return losses

    def parts(self, tensors: Mapping[str, Tensor], inputs: object) -> list[tuple[dict[str, Tensor], Any]]:
        """Returns tensors and batch of each member."""
        # one unbind per tensor: its backward pass is one stack, and that of indexing would fill all members with zeros
        split = {name: tensor.unbind(0) for name, tensor in tensors.items()}
        return [
            ({name: each[k] for name, each in split.items()}, own_part(inputs, k) if self.per_member else inputs)
            for k in range(self.num_members)
        ]

    def member(self, index: int, shares: bool = False) -> nn.Module:
        """Returns a member as a module of its own.

        Args:
            index: the member.
            shares: use the stack's storage; else copies of the member's tensors.
        """
        memo: dict[int, Any] = {}
        for tensor in self.stacked().values():
            own = tensor.detach()[index]
            own = own if shares else own.clone()
            memo[id(tensor)] = nn.Parameter(own) if isinstance(tensor, nn.Parameter) else own
        if shares:
            memo |= {id(tensor): tensor for tensor in self.module.parameters() if id(tensor) not in memo}
        gradients = [(each, each.grad) for each in self.module.parameters()]
        for parameter, _ in gradients:
            parameter.grad = None
        try:
            return copy.deepcopy(self.module, memo)
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def buffers_of(self, index: int) -> dict[str, Tensor]:
        """Returns copies of a member's own buffers by name, such as its statistics of batch norm."""
        own = self.stacked().items()
        return {name: tensor[index].clone() for name, tensor in own if not isinstance(tensor, nn.Parameter)}

    def load_member(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Copies tensors into a member.

        Args:
            index: the member.
            tensors: by name, as in `stacked`, of one member.
        """
        with torch.no_grad():
            for name, tensor in self.stacked().items():
                if name in tensors:
                    tensor[index].copy_(tensors[name])


def check_alike(members: Sequence[nn.Module]) -> None:
    """Checks that modules can be stacked.

    Raises:
        UnsupportedOption: there are names, shapes or frozen values that differ, or nothing to train.
    """
    first = dict(members[0].named_parameters())
    shapes = shapes_of(members[0])
    for number, each in enumerate(members[1:], 1):
        if shapes_of(each) != shapes:
            raise UnsupportedOption(
                f"members 0 and {number} differ in their architecture: model_init must return the same one for every "
                "seed."
            )
        for name, parameter in each.named_parameters():
            if not parameter.requires_grad and not torch.equal(parameter, first[name]):
                raise UnsupportedOption(
                    f"the frozen parameter {name!r} differs between members 0 and {number}: frozen parameters are "
                    "stored once. Load the same pretrained weights in model_init, or let it be trained."
                )
    if any(nn.parameter.is_lazy(each) for each in first.values()):
        raise UnsupportedOption("members with lazy modules, whose shapes are not known: call each with a batch first.")


def shapes_of(module: nn.Module) -> dict[str, Any]:
    """Returns shape, dtype and trainability of each parameter and buffer by name."""
    found = {name: (p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters()}
    return found | {name: (b.shape, b.dtype) for name, b in module.named_buffers()}


def stacked_buffers(members: Sequence[nn.Module]) -> list[str]:
    """Returns the names of buffers that each member needs for itself."""
    statistics = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in members[0].named_modules()
        if isinstance(module, _NormBase)
        for name, _ in module.named_buffers(recurse=False)
    }
    return [
        name
        for name, buffer in members[0].named_buffers()
        if name in statistics or any(not torch.equal(buffer, each.get_buffer(name)) for each in members[1:])
    ]


def places_of(module: nn.Module, buffers: Sequence[str]) -> list[tuple[str, dict[str, Any], str]]:
    """Returns (name, dict that holds it, key) of trainable parameters and of these buffers.

    To look a tensor up there takes far less time than to walk through the modules in each step.
    """
    places: list[tuple[str, dict[str, Any], str]] = []
    for name, parameter in module.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if parameter.requires_grad:
            places.append((name, module.get_submodule(owner)._parameters, leaf))
    for name in buffers:
        owner, _, leaf = name.rpartition(".")
        places.append((name, module.get_submodule(owner)._buffers, leaf))
    return places


def replace_parameters(module: nn.Module, replacements: Mapping[int, nn.Parameter]) -> None:
    """Replaces parameters wherever they are used, given by the id of the former ones."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) in replacements:
                part._parameters[name] = replacements[id(parameter)]


def axes_of(inputs: object) -> Any:
    """Returns the axis of the members for each value of a batch: 1 for tensors, None for other values."""
    if isinstance(inputs, Mapping):
        return {name: axes_of(value) for name, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        return type(inputs)(axes_of(value) for value in inputs)
    return 1 if isinstance(inputs, Tensor) else None


def own_part(inputs: object, index: int) -> Any:
    """Returns a member's part of a batch."""
    if isinstance(inputs, Mapping):
        return {name: own_part(value, index) for name, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        return type(inputs)(own_part(value, index) for value in inputs)
    return inputs.select(1, index) if isinstance(inputs, Tensor) else inputs
