"""XLA devices through torch_xla: whether a run is to use them, which, and their random numbers.

torch_xla is imported only where it is used: its import takes seconds, and having it installed asks for nothing.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch

from paceline.args.errors import UnsupportedOption
from paceline.args.sharding import is_asked, is_xla_asked
from paceline.core.optional import is_installed, require

logger = logging.getLogger(__name__)

EXTRA = "xla"
TPU_FILES = ("/dev/accel0", "/dev/vfio/0")  # one of them is there for the first chip of a machine


def wants_xla(args: Any) -> bool:
    """Whether a run is to be on XLA devices: the arguments say so, or PJRT_DEVICE does, or there is a TPU and no other
    accelerator.

    PJRT_DEVICE=CPU alone does not count: torch_xla sets it by itself wherever another library asks it for a device.
    """
    if args.use_cpu:
        return False
    if is_xla_asked(args.parallel, args.fsdp, args.fsdp_config):
        return True
    if not is_installed("torch_xla"):
        return False
    named = os.environ.get("PJRT_DEVICE")
    if named is not None:
        return named != "CPU"
    return not torch.accelerator.is_available() and has_tpu()


def has_tpu() -> bool:
    """Whether this machine has TPU chips and the library that drives them."""
    if not is_installed("libtpu") or not any(Path(name).exists() for name in TPU_FILES):
        return False
    return int(require("torch_xla._internal.tpu", EXTRA).num_available_chips()) > 0


def start_device(args: Any, num_processes: int) -> torch.device:
    """The XLA device of this process; with several to share the work, the one that stands for all of them.

    Args:
        args: `fsdp`, `fsdp_config` and `tpu_num_cores` are read; where the last is unset, TPU_NUM_CORES
            of the environment.
        num_processes: that a launcher started.

    Raises:
        ImportError: torch_xla is missing.
        UnsupportedOption: there are several processes.
        ValueError: another number of devices was asked for than one or all.
    """
    runtime: Any = require("torch_xla.runtime", EXTRA)
    if num_processes > 1:
        raise UnsupportedOption(
            f"XLA devices with {num_processes} processes are not supported: start one process of this script, which "
            "drives all devices of its machine (fsdp=True, fsdp_config={'xla': True, 'xla_fsdp_v2': True})."
        )
    if is_shared(args) and not runtime.is_spmd():
        runtime.use_spmd()  # before the first tensor: a device of this mode stands for all of them
    device = torch.device(require("torch_xla", EXTRA).device())
    count, asked = int(runtime.global_runtime_device_count()), number_asked(args)
    if runtime.process_count() > 1:
        raise UnsupportedOption(
            f"XLA devices of {runtime.process_count()} machines are not supported: use those of one (a TPU host, not a "
            "pod slice)."
        )
    if asked not in (None, 1, count):
        raise ValueError(f"tpu_num_cores={asked} is not possible: there are {count} XLA devices; use 1 or {count}.")
    return device


def number_asked(args: Any) -> int | None:
    """`tpu_num_cores`, or what the environment says in its place."""
    if args.tpu_num_cores is not None:
        return int(args.tpu_num_cores)
    text = os.environ.get("TPU_NUM_CORES", "")
    if not text:
        return None
    if not text.isdecimal() or text == "0":
        raise ValueError(f"TPU_NUM_CORES={text!r} is not possible: set the variable to a whole number, or unset it.")
    return int(text)


def is_shared(args: Any) -> bool:
    """Whether several XLA devices share the work: with shards of the model, or the whole of it on each."""
    return is_asked(args.fsdp) or args.parallel == "fsdp" or (number_asked(args) or 1) > 1


# ---- random numbers: the devices have a generator of their own, which torch's functions do not reach


def started() -> Any:
    """torch_xla's module of generators where this process uses XLA devices; else None. Imports nothing."""
    module = sys.modules.get("torch_xla")
    if module is None or not module._XLAC._xla_runtime_is_initialized():
        return None
    return require("torch_xla.core.xla_model", EXTRA)


def seed_devices(seed: int) -> None:
    """Seed their generator, where there are any in use."""
    generators = started()
    if generators is not None:
        generators.set_rng_state(seed)


def random_state() -> int | None:
    """The state of their generator; None where there are none in use."""
    generators = started()
    return None if generators is None else int(generators.get_rng_state())
