"""Names of transformers 4 that libraries still import; they are restored while `drop_in` is installed.

Most of them are in another module of transformers today. `transformers.trainer` also exports the names that the methods
of paceline's Trainer use: libraries that patch a method's source run the changed source in that module's namespace.
"""

from __future__ import annotations

import importlib
import sys
from enum import Enum
from types import ModuleType
from typing import Any

import paceline
from paceline.args.choices import IntervalStrategy
from paceline.compat import private_names
from paceline.pytorch import trainer
from paceline.pytorch.optim.adamw_of_v4 import AdamW

# modules of helper functions and classes that transformers.trainer used to import
SHOWN_BY_TRAINER = (
    "trainer_pt_utils", "trainer_utils", "training_args", "optimization", "pytorch_utils", "trainer_callback",
)  # fmt: skip
# module -> its former name
MOVED_MODULES = {"deepspeed": "integrations.deepspeed"}
# (module, name) -> its current (module, name)
MOVED_NAMES = {
    ("trainer", "is_deepspeed_zero3_enabled"): ("integrations.deepspeed", "is_deepspeed_zero3_enabled"),
    ("trainer", "hp_params"): ("integrations.integration_utils", "hp_params"),
    ("trainer", "is_torch_tpu_available"): ("utils", "is_torch_xla_available"),
    ("trainer", "is_apex_available"): ("utils", "is_apex_available"),
    ("trainer_utils", "neftune_post_forward_hook"): ("integrations.neftune", "neftune_post_forward_hook"),
    ("training_args", "default_logdir"): ("integrations.integration_utils", "default_logdir"),
    ("integrations", "default_logdir"): ("integrations.integration_utils", "default_logdir"),
}


class ShardedDDPOption(Enum):
    """Values of `sharded_ddp`, an unused option of version 4; trainers compare with them."""

    SIMPLE = "simple"
    ZERO_DP_2 = "zero_dp_2"
    ZERO_DP_3 = "zero_dp_3"
    OFFLOAD = "offload"
    AUTO_WRAP = "auto_wrap"


def module_of(suffix: str) -> ModuleType | None:
    """Returns a module of transformers; None if this release has no such module."""
    try:
        return importlib.import_module(f"transformers.{suffix}" if suffix else "transformers")
    except ImportError:
        return None


def older_names() -> dict[tuple[str, str], Any]:
    """Maps (module of transformers, name) to the object to export if the module lacks that name."""
    found: dict[tuple[str, str], Any] = {}
    for suffix in SHOWN_BY_TRAINER:
        module = module_of(suffix)
        for name, value in vars(module).items() if module is not None else ():
            if not name.startswith("_"):
                found["trainer", name] = value
    for place, (suffix, name) in MOVED_NAMES.items():
        value = getattr(module_of(suffix), name, None)
        if value is not None:
            found[place] = value
    for suffix in ("", "optimization", "trainer"):
        found[suffix, "AdamW"] = AdamW
    for suffix in ("trainer_utils", "training_args", "trainer"):
        found[suffix, "ShardedDDPOption"] = ShardedDDPOption
        found[suffix, "EvaluationStrategy"] = IntervalStrategy
    for suffix in ("", "data", "data.data_collator"):
        for name in ("DataCollatorForSOP", "DataCollatorForWholeWordMask"):
            found[suffix, name] = getattr(paceline, name)
    for ours in (private_names, trainer):
        found.update({("trainer", name): value for name, value in vars(ours).items() if not name.startswith("__")})
    return found


def add_names() -> list[tuple[ModuleType, str]]:
    """Adds the older names and modules that are missing; returns the argument of `remove_names`."""
    added = []
    for (suffix, name), value in older_names().items():
        module = module_of(suffix)
        if module is not None and not hasattr(module, name):
            setattr(module, name, value)
            added.append((module, name))
    for older, newer in MOVED_MODULES.items():
        target, top = module_of(newer), importlib.import_module("transformers")
        if target is not None and module_of(older) is None:
            sys.modules[f"transformers.{older}"] = target
            setattr(top, older, target)
            added.append((top, older))
    return added


def remove_names(added: list[tuple[ModuleType, str]]) -> None:
    """Undoes `add_names`."""
    for module, name in added:
        vars(module).pop(name, None)
        if name in MOVED_MODULES:
            sys.modules.pop(f"transformers.{name}", None)
