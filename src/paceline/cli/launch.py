"""`paceline launch`: runs a script on several processes, through torchrun."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from paceline.cli.errors import UsageError
from paceline.cli.texts import LAUNCH

# torchrun's options for several machines
_RENDEZVOUS = ("--nnodes", "--rdzv", "--master", "--node-rank", "--node_rank", "--standalone", "PET_NNODES", "PET_RDZV")
_NUMBER = ("--nproc-per-node", "--nproc_per_node", "PET_NPROC")
_VARIABLES = ("PET_NNODES", "PET_RDZV_ENDPOINT", "PET_NPROC_PER_NODE")


def run(words: list[str]) -> int:
    """Starts the processes and waits for them.

    Args:
        words: torchrun's options, the script, and the script's own.

    Returns:
        0, or 1 if a process failed for good; torchrun has then reported which, and why.

    Raises:
        UsageError: there is no script, or the number of processes is unknown.
    """
    if not words:
        raise UsageError(f"launch needs a script\n\n{LAUNCH}")
    launcher: Any = torchrun
    parsed = launcher.parse_args([*default_options(words), *words])
    if parsed.training_script is None:
        raise UsageError("launch needs a script")
    try:
        launcher.run(parsed)
    except ChildFailedError as error:
        print(error)
        return 1
    return 0


def default_options(words: list[str]) -> list[str]:
    """Returns the default options: one process per accelerator of this machine, and no other machine.

    Cluster operators set torchrun's own variables, such as PET_NNODES.
    """
    script = next((index for index, word in enumerate(words) if word.endswith(".py")), len(words))
    own = [*words[:script], *(name for name in _VARIABLES if name in os.environ)]
    options = [] if any(word.startswith(_RENDEZVOUS) for word in own) else ["--standalone"]
    if not any(word.startswith(_NUMBER) for word in own):
        number = torch.accelerator.device_count()
        if number == 0:
            raise UsageError("this machine has no accelerator: set the number of processes with --nproc-per-node N")
        options.append(f"--nproc-per-node={number}")
    return options
