"""The command `paceline`: dispatches to subcommands. Help and version import neither torch nor a job."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from paceline.args.secrets import mask_text
from paceline.cli import texts
from paceline.cli.config import read_job
from paceline.cli.demo.options import read_demo_options
from paceline.cli.display import AboveBars
from paceline.cli.errors import UsageError, is_message, load_part, suggest
from paceline.cli.launch_words import is_for_service, own_words
from paceline.cli.replay_options import read_replay_options
from paceline.core.terminal import show, without_controls

COMMANDS = (
    "demo",
    "init",
    "plan",
    "doctor",
    "train",
    "search",
    "schema",
    "completion",
    "launch",
    "control",
    "report",
    "compare",
    "runs",
    "serve",
    "watch",
    "verify",
    "export",
    "average",
    "replay",
)
HELP_WORDS = ("-h", "--help", "help")


def tell(text: str) -> None:
    """Prints an error without secrets and control characters, to the standard error output."""
    show(without_controls(mask_text(f"paceline: {text}")), sys.stderr)


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        words: the command line without the program; None for the command line of this process.

    Returns:
        0 on success, 1 if the run failed (`compare`: if runs differ), 2 for an invalid command line or configuration,
        130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if words is None else words)
    try:
        code = dispatch(words)
        if sys.stdout is not None:
            sys.stdout.flush()  # an error is reported here, and not by Python at exit
        return code
    except UsageError as error:
        tell("\n".join([str(error), *getattr(error.__cause__, "__notes__", ())]))
        return 2
    except BrokenPipeError:  # the reader (`| head`) has closed the pipe
        drop_output()
        return 141
    except KeyboardInterrupt as error:
        print(file=sys.stderr)
        tell("\n".join(["interrupted", *getattr(error, "__notes__", ())]))
        return 130
    except (
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        MemoryError,
        RuntimeError,
        ImportError,
        OSError,
    ) as error:
        if not is_message(error):
            raise
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        tell(text)
        try:
            sys.stdout.flush()
        except (AttributeError, OSError):  # no output, or it is what failed
            drop_output()
        return 1


def drop_output() -> None:
    """Discards what the standard output has not taken: at exit Python would try again, and report the error again."""
    with suppress(AttributeError, OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def dispatch(words: list[str]) -> int:
    """Finds the command and runs it.

    Raises:
        UsageError: there is no such command.
    """
    if words[:1] == ["help"] and words[1:2] and words[1] in COMMANDS:
        words = [words[1], "--help", *words[2:]]
    if not words or words[0] in HELP_WORDS:
        show(texts.HELP)
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"paceline {importlib.import_module('paceline').__version__}")
        return 0
    command, *rest = words
    if command.startswith("-"):
        raise UsageError(f"there is no option {command!r} before a command; options of a command stand after it")
    if command not in COMMANDS:
        raise UsageError(f"there is no command {command!r}{suggest(command, COMMANDS)}")
    if any(word in HELP_WORDS[:2] for word in (own_words(rest) if command == "launch" else rest)):
        show(texts.help_on(command, rest))
        return 0
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[AboveBars()])
    runners: dict[str, Callable[[list[str]], int]] = {
        "demo": run_demo,
        "train": run_train,
        "launch": run_launch,
        "replay": run_replay,
        "search": run_search,
    }
    return runners.get(command, partial(run_part, command))(rest)


def run_demo(words: list[str]) -> int:
    """Runs `paceline demo [text|digits]`."""
    options = read_demo_options(words)  # a wrong option is reported before torch is imported
    name = options.job if options.framework == "torch" else f"{options.job}_{options.framework}"
    job = load_part(f"paceline.cli.demo.{name}")
    return int(job.run(options))


def run_part(command: str, words: list[str]) -> int:
    """Runs a command that is the function `run` of a module of its own name."""
    return int(load_part(f"paceline.cli.{command}").run(words))


def run_launch(words: list[str]) -> int:
    """Runs `paceline launch SCRIPT`, or writes a file for a service with `--on`, which needs no torch."""
    return run_part("launch_files" if is_for_service(words) else "launch", words)


def run_replay(words: list[str]) -> int:
    """Runs `paceline replay RUN --step N`."""
    options = read_replay_options(words)
    return int(load_part("paceline.cli.replay").run(options))


def run_search(words: list[str]) -> int:
    """Runs `paceline search CONFIG.yaml`."""
    options = load_part("paceline.cli.search_options").read_search(words)
    return int(load_part("paceline.cli.search").run(options))


def run_train(words: list[str]) -> int:
    """Runs `paceline train CONFIG.yaml`."""
    config, fresh = read_job(words)
    return int(importlib.import_module("paceline.cli.train").run(config, fresh))
