"""Moments of optimizers in bfloat16, rounded stochastically.

Rounded to nearest, a second moment in bfloat16 stops changing: with beta2=0.999 it moves by at most a thousandth of
itself, and half the distance between two numbers of 8 significant bits is at least two thousandths. Rounded up or down
with probabilities in proportion to the distances, the expected value is that of the float32 moment (Gupta et al., 2015,
arXiv:1502.02551).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.pytorch.model.tensor_parts import is_dtensor

MOMENTS = frozenset(
    (
        "acc_delta",
        "exp_avg",
        "exp_avg_sq",
        "exp_inf",
        "grad_avg",
        "max_exp_avg_sq",
        "momentum_buffer",
        "square_avg",
        "sum",
    )
)
"""Names of torch's optimizers for moments."""

ROUNDS = "rounds"  # number of times that the moments of a parameter were rounded: seeds the next noise
CHUNK = 1 << 24  # elements rounded at a time: 64 MiB of noise


class ShortMoments:
    """Holds the moments of one parameter at a time in float32, while it is stepped, and all others in bfloat16.

    The noise depends on the seed, the position of the parameter in the optimizer and the number of its steps, which is
    part of its state. A resumed run therefore repeats it, and processes that hold copies of a parameter round alike.

    Args:
        seed: the seed of the run.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._is_checked = False
        self._generators: dict[torch.device, torch.Generator] = {}

    def expand(self, entry: dict[str, Any]) -> None:
        """Converts the moments in a parameter's state to float32."""
        for name in MOMENTS & entry.keys():
            value = entry[name]
            if isinstance(value, Tensor) and value.dtype == torch.bfloat16:
                entry[name] = value.float()

    def shorten(self, entry: dict[str, Any], parameter: Tensor, place: int) -> None:
        """Rounds the moments in a parameter's state to bfloat16.

        Args:
            entry: the state.
            parameter: the parameter.
            place: its position in the optimizer.

        Raises:
            ValueError: the parameter is not float32, or its state holds quantized moments or a tensor of its shape that
                is no known moment.
        """
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"optimizer_state_dtype='bfloat16' requires float32 weights, and a weight of shape "
                f"{tuple(parameter.shape)} is {str(parameter.dtype).removeprefix('torch.')}: load the model in float32 "
                "(bf16=True computes in 16 bits), or leave the option out."
            )
        rounds = int(entry.get(ROUNDS, 0))  # on the host, except just after it was loaded
        generator = None
        for name in sorted(entry):
            value = entry[name]
            is_moment = name in MOMENTS
            if not isinstance(value, Tensor) or value.dtype != torch.float32:
                continue
            if not is_moment and (value.shape != parameter.shape or value.dim() == 0):  # row means, or a counter
                continue
            if not is_moment or type(local(value)) is not Tensor:  # a quantized moment is a subclass
                raise ValueError(
                    f"optimizer_state_dtype='bfloat16': the optimizer's state {name!r} is not known as a moment that "
                    f"may be rounded ({', '.join(sorted(MOMENTS))}, not quantized): leave the option out, or choose "
                    "another optimizer."
                )
            if generator is None:
                generator = self._generator(value.device, place, rounds)
                entry[ROUNDS] = torch.tensor(rounds + 1, dtype=torch.float64)  # as plain optimizers load
            entry[name] = round_stochastically(value, generator)

    def check(self, state: Mapping[Any, Mapping[str, Any]]) -> None:
        """Checks that the state holds moments, once there is a state.

        Raises:
            ValueError: it holds none, so that the option would have no effect.
        """
        if self._is_checked:
            return
        if not any(ROUNDS in entry for entry in state.values()):
            raise ValueError(
                "optimizer_state_dtype='bfloat16': the optimizer has no moments in float32 to hold in bfloat16; leave "
                "the option out."
            )
        self._is_checked = True

    def _generator(self, device: torch.device, place: int, rounds: int) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        digest = hashlib.blake2b(f"{self.seed} {place} {rounds}".encode(), digest_size=8).digest()
        return self._generators[device].manual_seed(int.from_bytes(digest, "big") >> 1)


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Returns float32 values in bfloat16, rounded up or down at random so that the mean is exact.

    Values that bfloat16 represents, infinities and NaN stay as they are. Of a sharded tensor each process rounds its
    own shard.
    """
    rounded = torch.empty_like(values, dtype=torch.bfloat16)
    source, target = local(values), local(rounded)
    are_flat = source.is_contiguous() and target.is_contiguous()
    pieces = [each.view(-1) if are_flat else each for each in (source, target)]
    size = CHUNK if are_flat else max(len(source), 1)
    for numbers, place in zip(*(torch.split(each, size) for each in pieces), strict=True):
        # bfloat16 is the upper half of float32: noise in the lower half carries into it in proportion to its value
        upper = random_16_bits(numbers.shape, numbers.device, generator).add_(numbers.view(torch.int32))
        upper = upper.bitwise_and_(-(1 << 16)).view(torch.float32)
        place.copy_(upper.masked_fill_(numbers.isnan(), math.nan))  # whose bits may carry into those of a number
    return rounded


def local(tensor: Tensor) -> Tensor:
    """Returns this process's shard of a sharded tensor; any other tensor unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def random_16_bits(shape: torch.Size, device: torch.device, generator: torch.Generator) -> Tensor:
    """Returns int32 numbers from 0 to 65,535, four of each draw of the generator."""
    words = torch.empty(-(-shape.numel() // 4), dtype=torch.int64, device=device)
    halves = words.random_(-(1 << 63), None, generator=generator).view(torch.int16)
    return halves[: shape.numel()].to(torch.int32).bitwise_and_(0xFFFF).view(shape)
