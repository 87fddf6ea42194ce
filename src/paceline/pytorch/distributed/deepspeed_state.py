"""Weights and optimizer state of a DeepSpeed engine, gathered from its partitions and scattered to them again.

ZeRO keeps each parameter group as one flat float32 tensor, of which every process holds a part. The state returned here
has the shapes of the model's own parameters, so that it can be loaded with any number of processes, or without
DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from paceline.args.errors import UnsupportedOption

Place = tuple[Tensor, int, int, int]
"""(flat tensor, offset in it, offset in the flattened parameter, number of elements) of one part of a parameter."""


class Partitions:
    """The location of each parameter in ZeRO's partitions.

    Args:
        engine: DeepSpeed's engine.
        stage: ZeRO's stage, 1 to 3; without ZeRO there are no partitions.
    """

    def __init__(self, engine: Any, stage: int) -> None:
        self.engine = engine
        self.stage = stage
        self.zero = engine.optimizer
        self.device = engine.device

    def shape_of(self, parameter: nn.Parameter) -> torch.Size:
        """Returns the shape of the whole parameter."""
        shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
        return shape

    def holds(self, parameter: nn.Parameter) -> bool:
        """True if ZeRO has partitioned a parameter for the optimizer; a trainable one need not be among its groups."""
        if self.stage == 3:
            return self.zero.get_param_id(parameter) in self.zero.grad_position
        return hasattr(parameter, "_hp_mapping")

    def place_of(self, parameter: nn.Parameter) -> Place | None:
        """Returns the part of a trained parameter on this process; None if this process holds no part."""
        if not self.holds(parameter):
            return None
        if self.stage == 3:
            group, start, _ = self.zero.grad_position[self.zero.get_param_id(parameter)]
            size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
            first = size * distributed.get_rank(self.zero.dp_process_group)
            count = max(min(size, self.shape_of(parameter).numel() - first), 0)  # the last part is padded
            return (self.zero.fp32_partitioned_groups_flat[group], start, first, count) if count else None
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return None
        flat = self.zero.single_partition_of_fp32_groups[mapping.param_group_index]
        kept, own = mapping.hp_fragment_address, mapping.lp_fragment_address
        return flat, kept.start, own.start, kept.numel

    def flats(self) -> list[Tensor]:
        """Returns this process's flat float32 tensors, one per parameter group."""
        return list(self.zero.fp32_partitioned_groups_flat if self.stage == 3 else
                    self.zero.single_partition_of_fp32_groups)  # fmt: skip

    def gather(self, parameter: nn.Parameter, pick: Callable[[Tensor], Tensor]) -> Tensor:
        """Gathers the whole tensor that `pick` selects for each flat tensor, in the parameter's shape, on the host.

        Collective.
        """
        shape, place = self.shape_of(parameter), self.place_of(parameter)
        whole = torch.zeros(shape.numel(), dtype=self.dtype, device=self.device)
        if place is not None:
            flat, start, first, count = place
            whole[first : first + count] = pick(flat)[start : start + count].to(self.device)
        distributed.all_reduce(whole, group=self.zero.dp_process_group)
        return whole.view(shape).cpu()

    def scatter(self, parameter: nn.Parameter, whole: Tensor, pick: Callable[[Tensor], Tensor]) -> None:
        """Stores this process's part of a whole tensor in the tensor that `pick` selects for a flat tensor."""
        place = self.place_of(parameter)
        if place is not None:
            flat, start, first, count = place
            part = whole.reshape(-1)[first : first + count]
            pick(flat)[start : start + count].copy_(part)

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the master weights, which the optimizer steps."""
        return self.flats()[0].dtype


class PartitionedOptimizer(Optimizer):
    """An optimizer whose parameters and state DeepSpeed partitions; its state dict is that of the whole model.

    Args:
        base: the optimizer that DeepSpeed steps.
        groups: the trained parameters of each parameter group, from before DeepSpeed replaced them.
        partitions: ZeRO's partitions.
    """

    def __init__(self, base: Optimizer, groups: list[list[nn.Parameter]], partitions: Partitions) -> None:
        # super().__init__ is not called: the groups belong to `base`, which DeepSpeed replaces as it steps
        self.base = base
        self.groups = groups
        self.partitions = partitions
        self.defaults = base.defaults
        self._opt_called = True  # else a schedule of this object would warn that it was never stepped

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.base.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.base.state

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base!r})"

    @property
    def model_parameters(self) -> list[nn.Parameter]:
        """Returns the trained parameters of the model."""
        return [parameter for group in self.groups for parameter in group]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        raise RuntimeError("DeepSpeed's engine steps this optimizer: let the Trainer step it.")

    def add_param_group(self, param_group: object) -> None:
        """Raises UnsupportedOption: ZeRO would neither reduce the gradients of further parameters nor step them."""
        raise UnsupportedOption(
            "optimizer.add_param_group with deepspeed (ZeRO) is not supported, whose parts are made before the first "
            "step: let the optimizer hold all parameters from the start, or use parallel='ddp' or 'fsdp'."
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the accumulated gradients."""
        self.partitions.zero.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole state of every parameter, on the host. Collective; empty before the first step."""
        state, groups, index = {}, [], 0
        for own, parameters in zip(self.base.param_groups, self.groups, strict=True):
            plain = {name: value for name, value in own.items() if name != "params"}
            groups.append({**plain, "params": list(range(index, index + len(parameters)))})
            for parameter in parameters:
                entry = self._state_of(parameter)
                if entry:
                    state[index] = entry
                index += 1
        return {"state": state, "param_groups": groups}

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        entries = self.base.state
        example = next((flat for flat in self.partitions.flats() if flat in entries), None)
        entry: dict[str, Any] = {}
        for name, value in entries[example].items() if example is not None else ():
            if isinstance(value, Tensor) and value.shape == example.shape and value.dim():  # type: ignore[union-attr]
                entry[name] = self.partitions.gather(parameter, lambda flat, name=name: entries[flat][name])  # type: ignore[misc]
            else:
                entry[name] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
        return entry

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Splits the state of a whole model into the partitions of this process.

        Raises:
            ValueError: the state has other parameter groups.
        """
        saved = state_dict["param_groups"]
        if [len(group["params"]) for group in saved] != [len(group) for group in self.groups]:
            raise ValueError("the groups of parameters are not those of this optimizer")
        for own, group in zip(self.base.param_groups, saved, strict=True):
            own.update({name: value for name, value in group.items() if name != "params"})
        entries = state_dict["state"]
        if not entries:
            return
        self._make_room(next(iter(entries.values())), self.partitions.shape_of(self._first(entries, saved)))
        for group, parameters in zip(saved, self.groups, strict=True):
            for index, parameter in zip(group["params"], parameters, strict=True):
                for name, value in entries.get(index, {}).items():
                    if isinstance(value, Tensor) and value.dim():
                        self.partitions.scatter(parameter, value, lambda flat, name=name: self.base.state[flat][name])  # type: ignore[misc]

    def _first(self, entries: Mapping[Any, Any], saved: Any) -> nn.Parameter:
        index = next(iter(entries))
        indices = [number for group in saved for number in group["params"]]
        return self.model_parameters[indices.index(index)]

    def _make_room(self, entry: Mapping[str, Any], shape: torch.Size) -> None:
        """Creates the state of the flat tensors, as the optimizer's first step would."""
        for flat in self.partitions.flats():
            own = self.base.state[flat]
            for name, value in entry.items():
                if isinstance(value, Tensor) and value.shape == shape and value.dim():
                    own.setdefault(name, torch.zeros_like(flat, memory_format=torch.preserve_format).detach())
                else:
                    own[name] = value.clone() if isinstance(value, Tensor) else value
