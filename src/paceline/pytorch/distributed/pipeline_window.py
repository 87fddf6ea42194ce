"""The losses of a window in a pipeline, computed on the last stage, and what a pipeline does not support."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from paceline.args.errors import UnsupportedOption
from paceline.args.mesh import Mesh
from paceline.args.sharding import wants_shards
from paceline.core.methods import is_ours
from paceline.pytorch.distributed.last_stage import LastStage
from paceline.pytorch.distributed.precision import Precision
from paceline.pytorch.distributed.window import Pass, PassRunner
from paceline.pytorch.model.loss import Counts


class WindowLosses:
    """Computes the losses of a window on the last stage, when the schedule requests them.

    Args:
        engine: runs a pass.
        passes: the passes of the window.
        last: the last stage, called in place of the model.
        take_loss: returns the loss of the latest call of `backward`, scaled, with its graph.

    Attributes:
        batches: the batches of all passes, prepared once because every stage reads them.
        weighing: the passes that are not dummies.
    """

    def __init__(
        self, engine: PassRunner, passes: list[Pass], last: LastStage, take_loss: Callable[[], Tensor]
    ) -> None:
        self.engine, self.last, self.take_loss = engine, last, take_loss
        passes = [replace(each, batch=engine.prepare_inputs(each.batch), is_prepared=True) for each in passes]
        self.batches = [each.batch for each in passes]
        self.weighing = [each for each in passes if not each.is_dummy]
        first = self.batches[0]
        self._dummy = Pass(first, Counts(0, None, 0), is_last=False, needs_factor=True, is_dummy=True, is_prepared=True)
        self._losses: dict[int, Tensor] = {}

    def make(self, number: int) -> Tensor:
        """Returns the scaled loss of a micro-batch, with its graph; an index beyond the window gives a loss of 0."""
        is_dummy = number >= len(self.weighing)
        current = self._dummy if is_dummy else self.weighing[number]
        current = replace(current, batch=copy.copy(current.batch))
        self.last.expect(current.batch)
        loss = self.engine.run_pass(current, self.last)
        self.last.check_called("compute_loss")
        if not is_dummy:
            self._losses[number] = loss
        return self.take_loss()

    def found(self) -> list[Tensor]:
        """Returns the contributions of the micro-batches to the window's loss, in order; empty on other stages."""
        return [self._losses[number] for number in sorted(self._losses)]


def check_options(mesh: Mesh, precision: Precision, args: Any) -> None:
    """Refuses meshes and options that a pipeline does not support.

    Raises:
        UnsupportedOption: names the option.
    """
    others = {axis: size for axis, size in mesh.axes.items() if axis not in ("pp", "dp_replicate")}
    if others:
        shown = ", ".join(f"{axis}={size}" for axis, size in others.items())
        raise UnsupportedOption(
            f"parallel: pp={mesh.pp} with {shown} is not supported: combine pp with dp_replicate only."
        )
    if precision.scales or precision.has_masters:
        raise UnsupportedOption("fp16=True with a pipeline is not supported: set bf16=True.")
    if wants_shards(args):
        raise UnsupportedOption(
            "checkpoint_format='sharded' (or fsdp_config['state_dict_type']) with a pipeline is not supported: "
            "leave it out."
        )
    if str(args.optim) == "auto":
        raise UnsupportedOption(
            "optim='auto' with a pipeline is not supported: processes with other layers might choose otherwise. "
            "Name an optimizer."
        )
    if args.torch_compile and args.compile_regions is False:
        raise UnsupportedOption(
            "compile_regions=False with a pipeline is not supported, which compiles the repeated blocks: leave it out."
        )
    for name in ("bf16_full_eval", "fp16_full_eval", "predict_with_generate", "linear_cross_entropy"):
        if getattr(args, name, False) not in (False, "auto"):
            value = getattr(args, name)
            raise UnsupportedOption(f"{name}={value!r} with a pipeline is not supported: leave it out.")


def check_own(training_step: Callable[..., Tensor]) -> None:
    """Refuses an overridden `training_step`: the schedule interleaves forward and backward of the micro-batches.

    Raises:
        ValueError: a subclass overrides `training_step`.
    """
    if not is_ours(training_step):
        name = getattr(training_step, "__qualname__", "training_step")
        raise ValueError(
            f"{name}: training_step cannot be overridden with stages on several processes, whose schedule runs forward "
            "and backward of all micro-batches. Override compute_loss, which the last stage calls, or leave 'pp' out "
            "of parallel."
        )
