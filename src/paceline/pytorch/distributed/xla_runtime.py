"""XLA devices through torch_xla: their selection for a run, and their random numbers.

torch_xla is imported only where it is used: its import takes seconds, and installing it does not select it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from paceline.args.errors import UnsupportedOption
from paceline.args.sections import Options
from paceline.args.sharding import is_asked, is_xla_asked
from paceline.core.optional import is_installed, require

EXTRA = "xla"
TPU_FILES = ("/dev/accel0", "/dev/vfio/0")  # one of them exists if a machine has a TPU chip


def wants_xla(args: Options) -> bool:
    """True if a run uses XLA devices: requested by the arguments or PJRT_DEVICE, or if a TPU is the only accelerator.

    PJRT_DEVICE=CPU alone does not count: torch_xla sets it itself when another library asks it for a device.
    """
    if args.use_cpu:
        return False
    if is_xla_asked(args.parallel, args.fsdp, args.fsdp_config):
        return True
    named = os.environ.get("PJRT_DEVICE")
    if named is not None:
        return named != "CPU" and is_installed("torch_xla")
    return not torch.accelerator.is_available() and has_tpu()


def has_tpu() -> bool:
    """True if this machine has TPU chips, and torch_xla with the library that drives them."""
    if not any(os.path.exists(name) for name in TPU_FILES):
        return False
    if not is_installed("torch_xla") or not is_installed("libtpu"):
        return False
    return int(require("torch_xla._internal.tpu", EXTRA).num_available_chips()) > 0


def start_device(args: Options, num_processes: int) -> torch.device:
    """Returns the XLA device of this process; if several devices share the work, the device that represents them all.

    Args:
        args: `fsdp`, `fsdp_config` and `tpu_num_cores` are read; if the last is unset, the environment variable
            TPU_NUM_CORES.
        num_processes: number of processes that a launcher started.

    Raises:
        ImportError: torch_xla is missing.
        UnsupportedOption: there are several processes or several machines.
        ValueError: `tpu_num_cores` is neither 1 nor the number of devices.
    """
    runtime: Any = require("torch_xla.runtime", EXTRA)
    if num_processes > 1:
        raise UnsupportedOption(
            f"XLA devices with {num_processes} processes are not supported: start one process of this script, which "
            "drives all devices of its machine (fsdp=True, fsdp_config={'xla': True, 'xla_fsdp_v2': True})."
        )
    if is_distributed(args) and not runtime.is_spmd():
        runtime.use_spmd()  # before the first tensor: in this mode one device represents all
    device = torch.device(require("torch_xla", EXTRA).device())
    count, asked = int(runtime.global_runtime_device_count()), number_asked(args)
    if runtime.process_count() > 1:
        raise UnsupportedOption(
            f"XLA devices of {runtime.process_count()} machines are not supported: use those of one (a TPU host, not a "
            "pod slice)."
        )
    if asked not in (None, 1, count):
        raise ValueError(f"tpu_num_cores={asked} is invalid: there are {count} XLA devices; use 1 or {count}.")
    return device


def number_asked(args: Options) -> int | None:
    """Returns `tpu_num_cores`, or TPU_NUM_CORES of the environment; None if neither is set."""
    if args.tpu_num_cores is not None:
        return int(args.tpu_num_cores)
    text = os.environ.get("TPU_NUM_CORES", "")
    if not text:
        return None
    if not text.isdecimal() or text == "0":
        raise ValueError(f"TPU_NUM_CORES={text!r} is invalid: expected a whole number, or no such variable.")
    return int(text)


def is_distributed(args: Options) -> bool:
    """True if several XLA devices share the work, with the model sharded or replicated."""
    return is_asked(args.fsdp) or args.parallel == "fsdp" or (number_asked(args) or 1) > 1


# ---- random numbers: the devices have their own generator, which torch's functions do not control


def started() -> Any:
    """Returns torch_xla's random number module if this process already uses XLA devices; else None."""
    module = sys.modules.get("torch_xla")
    if module is None or not module._XLAC._xla_runtime_is_initialized():
        return None
    return require("torch_xla.core.xla_model", EXTRA)


def seed_devices(seed: int) -> None:
    """Seeds the devices' generator, if any are in use."""
    generators = started()
    if generators is not None:
        generators.set_rng_state(seed)


def random_state() -> int | None:
    """Returns the state of the devices' generator; None if none are in use."""
    generators = started()
    return None if generators is None else int(generators.get_rng_state())
