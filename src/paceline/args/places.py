"""Where a run writes: a folder of this machine, or the URL of an object store, and the folder that is staged for it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

# two letters at least before ://, so that a drive of Windows is none
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def is_url(place: object) -> bool:
    """Whether a place is a URL, such as `s3://bucket/run`, and no path."""
    return isinstance(place, str) and _URL.match(place) is not None


def check_url(name: str, url: str) -> str:
    """A URL that checkpoints can go to, without a slash at its end.

    Raises:
        ValueError: it is none, names no place below the scheme, or holds a password or a signature.
    """
    if not is_url(url):
        raise ValueError(f"{name}={url!r} is no URL: write scheme://bucket/run, such as s3://bucket/run.")
    parts = urlsplit(url)
    if parts.query or (parts.password is not None):
        shown = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
        raise ValueError(
            f"{name}={shown!r} was given with a password or a signature in it, which would be written into logs: leave "
            "it out, and let the store's own variables hold it (docs/object_stores.md)."
        )
    trimmed = url.rstrip("/")
    if trimmed.endswith(":") or not (parts.netloc or parts.path).strip("/"):
        raise ValueError(f"{name}={url!r} names no place: write scheme://bucket/run, such as s3://bucket/run.")
    return trimmed


def staging_folder(url: str) -> str:
    """The local folder that a run writes to when its output belongs to `url`; the same at each start.

    It lies in the user's cache ($XDG_CACHE_HOME, else ~/.cache). A path, made by nobody yet.
    """
    scheme, _, rest = url.partition("://")
    parts = [re.sub(r"[^\w.=@+-]", "_", part) for part in rest.split("/") if part]
    safe = [part if part.strip(".") else "_" * len(part) for part in parts]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return str(Path(cache, "paceline", "staging", scheme.lower(), *safe))
