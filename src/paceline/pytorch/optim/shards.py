"""Refuses optimizers that cannot step or resume on shards, which are DTensors: with FSDP and tensor parallelism."""

from __future__ import annotations

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from paceline.args.errors import UnsupportedOption

_KERNELS = "its kernels take whole tensors"
_PROJECTORS = "it projects whole gradients, with a projector that is a whole tensor"

WHOLE_ONLY = {
    "apex": _KERNELS,
    "apollo_torch": _PROJECTORS,
    "bitsandbytes": _KERNELS,
    "galore_torch": _PROJECTORS,
    "lomo_optim": "it updates whole parameters inside the backward pass",
}
"""Import name of a package -> why its optimizers need whole parameters."""


def check_shards(optimizer: Optimizer, name: str) -> None:
    """Checks that an optimizer over shards can step and resume.

    Args:
        optimizer: any optimizer; those over whole parameters are not checked.
        name: its name in `optim`, for the message.

    Raises:
        UnsupportedOption: its package needs whole parameters.
    """
    kind = getattr(optimizer, "inner_class", type(optimizer))
    reason = WHOLE_ONLY.get(kind.__module__.split(".")[0])
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    if reason is not None and any(isinstance(each, DTensor) for each in parameters):
        raise UnsupportedOption(
            f"optim={name!r} ({kind.__name__}) with parameters that are sharded (fsdp, tensor parallelism) is not "
            f"supported, because {reason}: set parallel='ddp', or choose another optimizer, such as "
            "'adamw_torch_fused'."
        )
