"""`paceline serve FOLDER`: the pages of the runs below a folder, in a local browser. Does not import torch."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

from paceline.cli.display import say
from paceline.cli.errors import UsageError
from paceline.cli.options import Known, parse_options
from paceline.report.serve import RunServer

PORT = 8765


def run(words: Sequence[str]) -> int:
    """Serves until Ctrl-C.

    Raises:
        UsageError: no folder is given, it is none, or the port cannot be used.
    """
    folder, port = read_options(words)
    try:
        server = RunServer(folder, port)
    except NotADirectoryError as error:
        raise UsageError(str(error)) from error
    except (OSError, OverflowError) as error:
        is_taken = getattr(error, "errno", None) == errno.EADDRINUSE
        reason = "is used by another program" if is_taken else f"cannot be used: {getattr(error, 'strerror', error)}"
        raise UsageError(f"port {port} {reason}; --port 0 takes a free one") from error
    try:
        with server:
            say(f"The runs below {folder} are at {server.address} (Ctrl-C ends the server)")
            server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        print("\nThe server has ended.")
    return 0


def read_options(words: Sequence[str]) -> tuple[Path, int]:
    """Returns the folder and the port.

    Raises:
        UsageError: a word is unknown, missing or no port.
    """
    given = parse_options(words, Known(("FOLDER",), {"port": False, "charts": False}))
    charts = given.own.get("charts", "svg")
    if charts != "svg":
        raise UsageError(
            f"--charts {charts}: served pages have charts in SVG, which stay zoomed while a run trains; "
            f"paceline report RUN --charts {charts} writes a page with others"
        )
    if given.arguments:
        raise UsageError(f"serve takes --port, not --{next(iter(given.arguments))}")
    if not given.positional:
        raise UsageError("serve needs a folder: paceline serve FOLDER [--port N]")
    text = str(given.own.get("port", PORT))
    if not (text.isascii() and text.isdecimal()) or int(text) > 65_535:
        raise UsageError(f"--port {text}: give a number from 0 to 65535")
    return Path(given.positional[0]), int(text)
