"""DeepSpeed: ZeRO's partitions of optimizer state, gradients and parameters, on the device or in host memory.

DeepSpeed (Rajbhandari et al., 2020, arXiv:1910.02054) reduces and clips gradients and steps the optimizer. This module
controls the end of an accumulation window, the weights of micro-batches, the schedule and the checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from paceline.args.deepspeed_config import EngineConfig, fill_config, finish_schedule
from paceline.args.errors import UnsupportedOption
from paceline.args.mesh import Mesh
from paceline.core.optional import require
from paceline.pytorch.distributed.broadcast_init import spread_saved_buffers
from paceline.pytorch.distributed.deepspeed_state import PartitionedOptimizer, Partitions
from paceline.pytorch.distributed.precision import CastWeights, narrow
from paceline.pytorch.distributed.strategy import NOTHING, Prepared, SingleDevice
from paceline.pytorch.distributed.world import has_group
from paceline.pytorch.model.tensor_parts import differing_names

# elementwise optimizers of torch.optim: stepping a flat part of a parameter gives the same values as stepping it whole
ELEMENTWISE = {"Adadelta", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}


class DeepSpeed(SingleDevice):
    """One DeepSpeed engine per process.

    Args:
        world: as for `SingleDevice`.
        precision: `bf16` becomes 16-bit weights with float32 copies in the optimizer, as in DeepSpeed.
        args: `deepspeed` is read, and the options that the config must agree with.

    Raises:
        ValueError: the config contradicts the arguments.
        UnsupportedOption: fp16, a cast of the whole model for evaluation, or a policy that needs to undo an optimizer
            step.
        ImportError: the package is missing.
    """

    delays_grad_sync = True

    def __init__(self, world: Any, precision: Any, args: Any) -> None:
        settings = fill_config(args, world.world_size)
        if args.bf16_full_eval or args.fp16_full_eval:
            raise UnsupportedOption(
                "bf16_full_eval and fp16_full_eval cast whole models: not supported with deepspeed; leave them out, "
                "and set bf16=True to hold the weights in 16 bits throughout."
            )
        if args.nonfinite_policy in ("skip", "rollback"):
            raise UnsupportedOption(
                f"nonfinite_policy={args.nonfinite_policy!r} is not supported with deepspeed, which gives the norm of "
                "the gradients after the step: use 'warn' or 'raise'."
            )
        mesh = Mesh(dp_replicate=world.world_size)  # every process reads different samples
        super().__init__(world, CastWeights(world.device) if args.bf16 else precision, mesh)
        self.args = args
        self.settings = settings
        self.stage = settings.stage
        self.is_sharded = self.stage > 0
        self.in_step = self.stage > 1
        self.engine: Any = None
        self._partitions: Partitions | None = None
        self._norm: Tensor | None = None
        self._package = require("deepspeed", "deepspeed")
        check_device(self._package, world.device)
        if args.bf16:
            move = self.place
            self.place = lambda batch: narrow(move(batch), torch.bfloat16, ())

    def prepare(self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer] | None) -> Prepared:
        """Creates the optimizer and initializes DeepSpeed with it; a model that was already initialized with this
        optimizer keeps its engine.

        Raises:
            ValueError: DeepSpeed has already partitioned the model for another optimizer.
            UnsupportedOption: the optimizer cannot step parts of parameters.
        """
        self._model = model
        self.parameters = list(model.parameters())
        if make_optimizer is None:
            return Prepared(model.to(self.device), None)
        optimizer = make_optimizer(model)
        if isinstance(optimizer, PartitionedOptimizer) and optimizer.partitions.engine.module is model:
            self._adopt(optimizer.partitions.engine, optimizer)
            return Prepared(self.engine, optimizer, self._make_schedule)
        if any(hasattr(item, "_hp_mapping") or hasattr(item, "_z3_optimizer") for item in self.parameters):
            raise ValueError(
                "DeepSpeed has taken this model for another optimizer, and holds its weights in parts: make the "
                "Trainer with a new model, or pass model_init."
            )
        self.settings = fill_config(self.args, self.world.world_size, hidden_size_of(model))
        check_optimizer(optimizer, self.settings)
        groups = [[parameter for parameter in group["params"] if parameter.requires_grad]
                  for group in optimizer.param_groups]  # fmt: skip
        engine = self._initialize(model, optimizer)
        if self.stage > 0:
            partitions = Partitions(engine, self.stage)
            optimizer = PartitionedOptimizer(optimizer, [group for group in groups if group], partitions)
        self._adopt(engine, optimizer)
        return Prepared(engine, optimizer, self._make_schedule)

    def _initialize(self, model: nn.Module, optimizer: Optimizer) -> Any:
        """Returns the engine of this model. Weights that were float32 keep that precision in the master copies."""
        if "LOCAL_RANK" not in os.environ:
            raise ValueError(
                "DeepSpeed reads LOCAL_RANK, which is not set: start the script with `paceline launch` "
                "(--nproc-per-node 1 for one process) or torchrun, or leave deepspeed out."
            )
        if not has_group():  # one process
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        before = {parameter: parameter.data for parameter in self.parameters if parameter.requires_grad}
        config = {**self.settings.config}
        if self.stage == 0:
            config["gradient_clipping"] = 0.0  # in stage 0 gradients are whole, and are clipped as on one device
        engine, *_ = self._package.initialize(model=model, optimizer=optimizer, config=config)
        if self.args.bf16:
            partitions = Partitions(engine, self.stage)
            for parameter, weights in before.items():
                if weights.dtype != torch.bfloat16 and weights.numel():
                    partitions.scatter(parameter, weights, itself)
        return engine

    def _adopt(self, engine: object, optimizer: Optimizer) -> None:
        self.engine, self.optimizer = engine, optimizer
        self._partitions = optimizer.partitions if isinstance(optimizer, PartitionedOptimizer) else None
        self.clips_itself = self._partitions is not None
        if self._partitions is None:
            self._follow(optimizer)

    def _make_schedule(self, num_updates: int, num_warmup: int) -> Any:
        """Returns the schedule that DeepSpeed's config requests; None if it requests none."""
        if self.settings.schedule is None:
            return None
        name, params = self.settings.schedule
        schedules = require("deepspeed.runtime.lr_schedules", "deepspeed")
        return getattr(schedules, name)(self.engine.basic_optimizer, **finish_schedule(params, num_updates, num_warmup))

    def micro_step(self, last: bool, silent: bool = False) -> AbstractContextManager[Any]:
        """Sets whether the accumulation window ends. A micro-batch without weight has a loss factor of 0."""
        self.engine.set_gradient_accumulation_boundary(last)
        return NOTHING

    def backward(self, loss: Tensor) -> None:
        """Accumulates and reduces the gradients of `loss`, which is already normalized."""
        # times 1 to make a new tensor: the engine divides the gradient of the tensor that the model itself returned
        self.engine.backward(loss * 1, scale_wrt_gas=False)

    def clip(self, max_norm: float) -> Tensor | None:
        """Returns the norm of the gradients before clipping. With ZeRO, which clips as it steps, `step` fills it in."""
        if self._partitions is None:
            return super().clip(max_norm)
        self._norm = torch.full((), torch.nan, device=self.device) if max_norm > 0 else None
        return self._norm

    def step(self, is_bad: Tensor | None = None) -> bool:
        """Lets the engine clip and step. ZeRO skips an optimizer step whose float32 gradients are not finite."""
        self.engine.step()
        norm = self.engine.get_global_grad_norm() if self._partitions is not None else None
        if self._norm is not None and norm is not None:
            norm = float(norm)
            self._norm.fill_(norm if norm >= 0 else torch.nan)  # -1 stands for a non-finite norm
        return bool(self.engine.was_step_applied())

    def evaluation_model(self, model: nn.Module) -> nn.Module:
        """Returns the module itself, without the engine: its parameters gather themselves. It has the buffers of the
        first process.
        """
        inner = self.unwrap(model).to(self.device) if self.engine is None else self.unwrap(model)
        if has_group():
            spread_saved_buffers(inner, self.device)
        return inner

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Returns the module as the user gave it."""
        return super().unwrap(model.module if model is self.engine and self.engine is not None else model)

    def holds_part_of(self, model: nn.Module) -> bool:
        """True if the engine has partitioned this model's weights."""
        return self._partitions is not None and self.unwrap(model) is self.engine.module

    def whole_tensor(self, name: str, value: Tensor) -> Tensor:
        """Returns a value of the model on the host, in the precision of the master weights. Collective."""
        if self._partitions is None:
            return value.detach()
        if not isinstance(value, nn.Parameter):
            return value.detach().cpu()
        if self._partitions.holds(value):
            return self._partitions.gather(value, itself)
        if self.stage < 3:
            return value.detach().cpu()
        with self._package.zero.GatheredParameters([value]):
            return value.detach().cpu().clone()

    def full_state(self, state: object) -> Any:
        """Returns the nest unchanged: the optimizer's own state dict is whole."""
        return state

    def load_full(self, model: nn.Module, weights: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
        """Loads whole weights into the engine; returns the missing names, and the unexpected ones."""
        partitions = self._partitions
        if partitions is None:
            return super().load_full(model, weights)
        own = model.state_dict(keep_vars=True)
        given = [name for name in own if name in weights]  # in the same order on each process
        for name in given:
            value = own[name]
            if not isinstance(value, nn.Parameter):
                value.copy_(weights[name])
                continue
            if value.requires_grad:
                partitions.scatter(value, weights[name], itself)
            parameters = [value] if self.stage == 3 else []
            with torch.no_grad(), self._package.zero.GatheredParameters(parameters, modifier_rank=0):
                if self.stage < 3 or self.world.is_first:
                    value.copy_(weights[name])
        return differing_names(own, weights)


def itself(flat: Tensor) -> Tensor:
    """Selects the weights themselves for `Partitions.gather` and `scatter`: the flat tensor, detached."""
    return flat.detach()


def check_device(package: Any, device: torch.device) -> None:
    """Checks that DeepSpeed uses the device of the run.

    Raises:
        ValueError: DeepSpeed uses another device; the message names the environment variable that sets it.
    """
    found = package.accelerator.get_accelerator().device_name()
    if found != device.type:
        raise ValueError(
            f"DeepSpeed works on {found!r}, and this run on '{device.type}' (use_cpu): set "
            f"DS_ACCELERATOR={device.type} in the environment of the processes."
        )


def check_optimizer(optimizer: Optimizer, settings: EngineConfig) -> None:
    """Refuses an optimizer that needs whole parameters or keeps two sets of weights: ZeRO gives it flat parts.

    Raises:
        UnsupportedOption: the optimizer is not known to be elementwise.
        ValueError: the config requests another optimizer.
    """
    name = type(optimizer).__name__
    is_known = type(optimizer).__module__.startswith("torch.optim") and name in ELEMENTWISE
    if settings.stage > 0 and not is_known:
        raise UnsupportedOption(
            f"{name} is not supported with ZeRO, which gives it flat parts of parameters: use one of torch.optim's "
            f"{', '.join(sorted(ELEMENTWISE))}, or fsdp=True."
        )
    if settings.wants_adam and name not in ("Adam", "AdamW"):
        raise ValueError(f"deepspeed['optimizer'] asks for AdamW, and the Trainer has {name}: leave the section out.")


def hidden_size_of(model: nn.Module) -> int | None:
    """Returns the hidden size from the model's config, the largest of several; None if the config has none."""
    config = getattr(model, "config", None)
    for item in (config, getattr(config, "text_config", None)):
        sizes = getattr(item, "hidden_sizes", None) or [getattr(item, "hidden_size", None)]
        if all(isinstance(size, int) for size in sizes):
            return int(max(sizes))
    return None
