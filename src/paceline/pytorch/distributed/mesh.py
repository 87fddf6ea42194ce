"""A mesh of processes: tensor and context parallelism, with parameters sharded over the other axes (2-D and 3-D)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.args.errors import UnsupportedOption
from paceline.pytorch.distributed.context_link import context_of
from paceline.pytorch.distributed.context_parallel import ContextParallel
from paceline.pytorch.distributed.device_mesh import sequence_mesh
from paceline.pytorch.distributed.fsdp import FullyShardedData
from paceline.pytorch.distributed.tensor_parallel import parallelize, plan_of

logger = logging.getLogger(__name__)


class MeshParallel(FullyShardedData):
    """A model split over `tp`, and sharded over `dp_shard` and `cp` or `sp`, in replicas over `dp_replicate`.

    Ranks that differ only in `tp`, `cp` or `sp` read the same data. Ranks that differ in `tp` have the same
    activations between the split modules; ranks that differ in `cp` or `sp` hold different shards of every sequence.

    Args:
        world, precision: as for `SingleDevice`.
        args: `parallel`, `parallelism_config`, `fsdp`, `fsdp_config` and `tp_plan` are read.

    Raises:
        UnsupportedOption: an option that a mesh does not support.
    """

    def __init__(self, world: Any, precision: Any, args: Any) -> None:
        super().__init__(world, precision, args)
        if args.torch_compile and self.mesh.num_parts > 1:
            raise UnsupportedOption(
                f"torch_compile=True with a mesh of {self.mesh.describe()} is not supported: leave it out."
            )
        if self.sharding.from_first and self.mesh.tp > 1:
            raise UnsupportedOption(
                "fsdp_config['cpu_ram_efficient_loading'] and ['sync_module_states'] with tensor parallel "
                f"({self.mesh.describe()}) are not supported: load the model on every process, and leave them out."
            )
        self.plan = args.tp_plan
        self.checkpoints = bool(args.activation_checkpointing)
        self.smooths = bool(args.label_smoothing_factor)

    def run_within(self, model: nn.Module, function: Callable[[], Any]) -> Any:
        """Calls `function` as for shards; if sequences are sharded, each process uses whole sequences here."""
        context = context_of(model)  # from this or an earlier run of the model
        with context.uncut() if context is not None else nullcontext():
            return super().run_within(model, function)

    def clip(self, max_norm: float) -> Tensor | None:
        """Clips as for shards. A process skips the step if another has found an overflow in its part of a matrix.

        torch asks only the processes over which the first parameter is sharded.
        """
        norm = super().clip(max_norm)
        if self.mesh.tp > 1 and self.optimizer is not None:
            self.precision.share_overflow(self.optimizer)
        return norm

    def _shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        if self.mesh.tp > 1:
            number = parallelize(model, mesh["tp"], plan_of(model, self.plan))
            logger.info("Cut %d modules into %d parts each (tensor parallel).", number, self.mesh.tp)
        if self.mesh.size > self.mesh.tp:
            super()._shard(model, mesh)
        if self.mesh.num_parts > 1:
            by_heads = self.mesh.sp > 1
            parts = sequence_mesh(self.mesh, self.device.type)
            ContextParallel(model, parts, self.checkpoints, by_heads, self.smooths)
            kind = "sequence parallel, by heads" if by_heads else "context parallel"
            logger.info("Each process has a part of every sequence, of %d (%s).", self.mesh.num_parts, kind)
