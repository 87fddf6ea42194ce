"""`paceline launch`: runs a script on several processes with torchrun."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from paceline.args.errors import did_you_mean
from paceline.cli.errors import UsageError, first_line, suggest
from paceline.cli.texts import LAUNCH

# torchrun's options for several machines
_RENDEZVOUS = ("--nnodes", "--rdzv", "--master", "--node-rank", "--node_rank", "--standalone", "PET_NNODES", "PET_RDZV")
_NUMBER = ("--nproc-per-node", "--nproc_per_node", "PET_NPROC")
# values of --nproc-per-node with which torchrun counts the devices
_KINDS = ("auto", "cpu", "gpu", "xpu")
_VARIABLES = ("PET_NNODES", "PET_RDZV_ENDPOINT", "PET_NPROC_PER_NODE")


def run(words: list[str]) -> int:
    """Starts the processes and waits for them.

    Args:
        words: torchrun's options, the script, and the script's options.

    Returns:
        0, or 1 if a process failed after all restarts; torchrun's report is then printed. 128 + the signal's number
        if a signal ended it.

    Raises:
        UsageError: there is no script, or the number of processes is unknown.
    """
    if not words:
        raise UsageError(f"launch needs a script\n\n{LAUNCH}")
    launcher: Any = torchrun
    parsed = parse(launcher.get_args_parser(), words)
    check_script(parsed)
    try:
        launcher.run(parsed)
    except ChildFailedError as error:
        print(error)
        return 1
    except SignalException as error:  # the processes have had the same signal
        print(f"paceline launch: stopped by {error.sigval.name}")
        return 128 + int(error.sigval)
    except (ValueError, AssertionError) as error:  # torchrun's own checks of its options
        raise UsageError(f"torchrun rejected its options: {first_line(error)}") from error
    return 0


def parse(parser: Any, words: list[str]) -> Any:
    """Parses torchrun's options, completed by `default_options`.

    Raises:
        UsageError: an unknown option (the message names the closest known one), or an invalid value.
    """
    known = [name for name in parser._option_string_actions if name.startswith("--")]

    def fail(message: str) -> NoReturn:
        # torchrun's message about a missing script also names the script's arguments, which are optional
        text = message.replace("the following arguments are required: training_script, training_script_args", "")
        raise UsageError(f"launch: {text}" if text else "launch needs a script")

    parser.error = fail
    script = next((index for index, word in enumerate(words) if word.endswith(".py")), 0)
    for word in words[:script]:
        name = word.partition("=")[0].replace("_", "-")
        if name.startswith("--") and not any(option.replace("_", "-").startswith(name) for option in known):
            raise UsageError(f"there is no option {word.partition('=')[0]}{suggest(name, known)}")
    parsed, unknown = parser.parse_known_args([*default_options(words), *words])
    if unknown:
        raise UsageError(f"there is no option {unknown[0].partition('=')[0]}{suggest(unknown[0], known)}")
    number = str(parsed.nproc_per_node)
    if number not in _KINDS and not (number.isdecimal() and int(number) > 0):
        expected = f"expected a number of processes from 1 on, or {', '.join(_KINDS)}"
        raise UsageError(f"--nproc-per-node={number} is invalid: {expected}")
    machines = re.fullmatch(r"(\d+)(?::(\d+))?", str(parsed.nnodes))
    if machines is None or not 0 < int(machines[1]) <= int(machines[2] or machines[1]):
        raise UsageError(f"--nnodes={parsed.nnodes} is invalid: expected a number of machines, or LEAST:MOST")
    return parsed


def check_script(parsed: Any) -> None:
    """Checks that the script exists, before any process is started.

    Raises:
        UsageError: it does not exist; the message names the closest script in its folder.
    """
    if parsed.module or parsed.no_python:
        return
    path = Path(parsed.training_script)
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        raise UsageError(f"launch runs a script, not {path}: `paceline launch ... -m paceline train {path}`")
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise UsageError(f"{path} is a folder; expected a script")
    if not path.exists():
        folder = path.parent if path.parent.is_dir() else Path()
        near = did_you_mean(path.name, [each.name for each in folder.glob("*.py")])
        raise UsageError(f"{path} cannot be read: there is no such script{near}")


def default_options(words: list[str]) -> list[str]:
    """Returns the default options that are not given: one process per accelerator, on this machine only.

    torchrun's environment variables, such as PET_NNODES, count as given; cluster operators set them.
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
