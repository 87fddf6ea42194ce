"""Output locations: local folders, URLs of object stores, and their staging folders."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

# at least two letters before ://, which excludes Windows drives
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")

Arguments = TypeVar("Arguments")
BASE = "_output_base"  # the attribute of arguments that `fix_base` sets

# options of a throwaway run in a temporary `output_dir`: it saves, evaluates and reports nothing
WITHOUT_OUTPUT: dict[str, Any] = {
    "save_strategy": "no",
    "eval_strategy": "no",
    "eval_on_start": False,
    "load_best_model_at_end": False,
    "metric_for_best_model": None,
    "greater_is_better": None,
    "keep_best": 0,
    "keep_best_metric": None,
    "report_to": "none",
}


def is_url(place: object) -> bool:
    """True if a location is a URL, such as `s3://bucket/run`, and not a path."""
    return isinstance(place, str) and _URL.match(place) is not None


def check_url(name: str, url: str) -> str:
    """Returns a URL for checkpoints without a trailing slash.

    Raises:
        ValueError: it is not a URL, has no path, or contains a password or a signature.
    """
    if not is_url(url):
        raise ValueError(f"{name}={url!r} is not a URL: write scheme://bucket/run, such as s3://bucket/run.")
    parts = urlsplit(url)
    if parts.query or (parts.password is not None):
        shown = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
        raise ValueError(
            f"{name}={shown!r} contains a password or a signature, which would be written to logs: leave it out, and "
            "set it in the store's own environment variables (docs/object_stores.md)."
        )
    trimmed = url.rstrip("/")
    if trimmed.endswith(":") or not (parts.netloc or parts.path).strip("/"):
        raise ValueError(f"{name}={url!r} has no path: write scheme://bucket/run, such as s3://bucket/run.")
    return trimmed


def staging_folder(url: str) -> str:
    """Returns the local staging folder of a run whose output is stored at `url`; it is the same at each start.

    The folder is in the user's cache ($XDG_CACHE_HOME, else ~/.cache). It is not created.
    """
    scheme, _, rest = url.partition("://")
    parts = [re.sub(r"[^\w.=@+-]", "_", part) for part in rest.split("/") if part]
    safe = [part if part.strip(".") else "_" * len(part) for part in parts]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return str(Path(cache, "paceline", "staging", scheme.lower(), *safe))


def fix_base(args: Arguments) -> Arguments:
    """Makes the current directory the one that a relative `output_dir` is in, even if the process leaves it later.

    `output_dir` remains the text that the user gave. Called when a Trainer is made, and when it begins a run.
    """
    with suppress(OSError):  # the current directory may have been deleted
        vars(args)[BASE] = os.getcwd()
    return args


def placed(args: object, path: str | Path) -> Path:
    """Returns an absolute path; relative ones are in the directory of `fix_base`, before that in the current one."""
    return Path(vars(args).get(BASE, ""), path).absolute()


def output_folder(args: Any) -> Path:
    """Returns the absolute path of the folder that `output_dir` names."""
    return placed(args, str(args.output_dir))


def as_given(args: Any, path: Path) -> str:
    """Returns the text of an absolute path in the output folder, relative if `output_dir` is."""
    base = vars(args).get(BASE)
    if base is None or Path(str(args.output_dir)).is_absolute() or not path.is_relative_to(base):
        return str(path)
    return str(path.relative_to(base))
