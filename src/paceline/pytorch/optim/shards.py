"""Refuses optimizers that cannot step or resume on shards, which are DTensors: with FSDP and tensor parallelism.

Also those whose steps depend on the order of all parameters, of which a stage of a pipeline has some.
"""

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

IN_ORDER = {"grokadamw": "the decay of its first moment depends on the place of a parameter among those of its group"}
"""Import name of a package -> why its optimizers need all parameters in one process."""


def check_shards(optimizer: Optimizer, name: str) -> None:
    """Checks that an optimizer over shards, or over the parameters of a stage, can step and resume.

    Args:
        optimizer: any optimizer; those over whole parameters that are all here are not checked.
        name: its name in `optim`, for the message.

    Raises:
        UnsupportedOption: its package needs whole parameters, or all of them.
    """
    kind = getattr(optimizer, "inner_class", type(optimizer))
    reason = WHOLE_ONLY.get(kind.__module__.split(".")[0])
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    by_order = IN_ORDER.get(kind.__module__.split(".")[0])
    if by_order is not None and len({each.is_meta for each in parameters}) > 1:  # those of other stages have no values
        raise UnsupportedOption(
            f"optim={name!r} ({kind.__name__}) in a pipeline is not supported, because {by_order}: set parallel='ddp' "
            "or 'fsdp', or choose another optimizer, such as 'adamw_torch_fused'."
        )
    if reason is not None and any(isinstance(each, DTensor) for each in parameters):
        raise UnsupportedOption(
            f"optim={name!r} ({kind.__name__}) with parameters that are sharded (fsdp, tensor parallelism) is not "
            f"supported, because {reason}: set parallel='ddp', or choose another optimizer, such as "
            "'adamw_torch_fused'."
        )
