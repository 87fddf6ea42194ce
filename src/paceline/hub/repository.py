"""A repository of the hub: made, and committed to. All that is said to the server is said here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.core.optional import require

SHARD = re.compile(r"(?:pytorch_)?model(?:-\d{5}-of-\d{5}\.(?:safetensors|bin)|\.(?:safetensors|bin)\.index\.json)")


class HubError(OSError):
    """The repository cannot be pushed to; the message says why and what to do."""


def open_repository(name: str, *, token: str | None, private: bool | None, revision: str | None) -> str:
    """Make the repository where it is not there yet, and the branch.

    Args:
        name: "owner/name", or "name" alone: under the user whose token it is.
        token: None: that of `hf auth login` or `HF_TOKEN`.
        private: of a new repository; None: as the owner's default.
        revision: a branch to push to; None: main.

    Returns: its full id. Raises: HubError; ImportError, when huggingface_hub is missing.
    """
    hub = require("huggingface_hub", "hub")
    if require("huggingface_hub.constants", "hub").HF_HUB_OFFLINE:
        raise HubError(
            f"Nothing can be pushed to {name!r}: HF_HUB_OFFLINE is set. Unset it, or leave out push_to_hub and push "
            "the output folder later."
        )
    try:
        repo_id = str(hub.HfApi().create_repo(name, token=token, private=private, exist_ok=True).repo_id)
    except Exception as error:  # of whichever library the hub's client speaks through
        remedy = (
            "Log in with `hf auth login`, or set HF_TOKEN or hub_token to a token that may write; "
            "hub_model_id='owner/name' names another repository."
        )
        if is_unreachable(error):
            remedy = "Look to the network and HF_ENDPOINT, or leave out push_to_hub and push the output folder later."
        raise HubError(
            f"The hub repository {name!r} could not be made or reached ({in_words(error)}). {remedy}"
        ) from error
    make_branch(repo_id, revision, token)
    return repo_id


def is_unreachable(error: BaseException) -> bool:
    """Whether no server answered, in whichever library's words: a refused connection, an unknown host, a timeout."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"ConnectError", "ConnectionError", "TimeoutException", "Timeout"})


def make_branch(repo_id: str, revision: str | None, token: str | None) -> None:
    """Make the branch that is pushed to. References such as `refs/pr/1`, and main, are there already.

    Raises: HubError.
    """
    if revision is None or revision == "main" or revision.startswith("refs/"):
        return
    api = require("huggingface_hub", "hub").HfApi()
    try:
        api.create_branch(repo_id, branch=revision, token=token, exist_ok=True)
    except Exception as error:
        raise HubError(
            f"hub_revision={revision!r}: the branch could not be made in {repo_id} ({in_words(error)}). Name a branch."
        ) from error


def commit(
    repo_id: str,
    files: Mapping[str, Path],
    message: str,
    *,
    token: str | None,
    revision: str | None,
    owned: str | None = None,
) -> Any:
    """Upload files in one commit: whoever looks sees all of it, or nothing.

    Args:
        files: path in the repository -> file.
        owned: a folder of the repository that shall hold these files and no others.

    Returns: huggingface_hub's CommitInfo. Shards of an earlier push that belong to none of the files are deleted.
    """
    hub = require("huggingface_hub", "hub")
    api = hub.HfApi()
    present = api.list_repo_files(repo_id, revision=revision, token=token)
    has_weights = any(re.fullmatch(r"(?:pytorch_)?model[-.\w]*\.(?:safetensors|bin)", name) for name in files)
    stale = [
        name
        for name in present
        if name not in files
        and ((owned is not None and name.startswith(f"{owned}/")) or (has_weights and SHARD.fullmatch(name)))
    ]
    operations: list[Any] = [hub.CommitOperationDelete(name) for name in stale]
    operations += [hub.CommitOperationAdd(name, str(path)) for name, path in sorted(files.items())]
    return api.create_commit(repo_id, operations, commit_message=message, token=token, revision=revision)


def in_words(error: BaseException) -> str:
    """The first line of what an error says, with its type; and of the error that caused it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else ""
    words = f"{type(error).__name__}: {first}" if first else type(error).__name__
    cause = error.__cause__
    return words if cause is None or (first and first in str(cause)) else f"{words} <- {in_words(cause)}"
