"""Creates hub repositories and commits to them. All requests to the server are made here."""

from __future__ import annotations

import contextvars
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from paceline.args.secrets import describe_error
from paceline.core.optional import require

SHARD = re.compile(r"(?:pytorch_)?model(?:-\d{5}-of-\d{5}\.(?:safetensors|bin)|\.(?:safetensors|bin)\.index\.json)")

ANSWER_SECONDS = 60.0  # for a request without files, which a server answers within seconds


class HubError(OSError):
    """The repository cannot be pushed to; the message gives the reason and the remedy."""


def open_repository(name: str, *, token: str | None, private: bool | None, revision: str | None) -> str:
    """Creates the repository and the branch if missing.

    Args:
        name: "owner/name", or "name" for a repository of the token's user.
        token: the hub token; None takes the token of `hf auth login` or `HF_TOKEN`.
        private: visibility of a new repository; None takes the owner's default.
        revision: the branch to push to; None for main.

    Returns: the full id of the repository. Raises: HubError; ImportError, if huggingface_hub is missing.
    """
    hub = require("huggingface_hub", "hub")
    if require("huggingface_hub.constants", "hub").HF_HUB_OFFLINE:
        raise HubError(
            f"Nothing can be pushed to {name!r}: HF_HUB_OFFLINE is set. Unset it, or leave out push_to_hub and push "
            "the output folder later."
        )
    try:
        create = partial(hub.HfApi().create_repo, name, token=token, private=private, exist_ok=True)
        repo_id = str(answer_of(create, ANSWER_SECONDS).repo_id)
    except Exception as error:  # any error type of the HTTP library of the hub's client
        remedy = (
            "Log in with `hf auth login`, or set HF_TOKEN or hub_token to a token with write permission; "
            "hub_model_id='owner/name' names another repository."
        )
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int) and status >= 500:
            remedy = "The server failed: start again later, or leave out push_to_hub and push the output folder later."
        elif is_unreachable(error):
            remedy = "Check the network and HF_ENDPOINT, or leave out push_to_hub and push the output folder later."
        raise HubError(
            f"The hub repository {name!r} could not be created or reached ({in_words(error)}). {remedy}"
        ) from error
    make_branch(repo_id, revision, token)
    return repo_id


def answer_of(call: Callable[[], Any], seconds: float) -> Any:
    """Returns the result of a request, or raises its error.

    The client waits without limit for a server that accepts a connection and does not answer.

    Raises:
        TimeoutError: there was no answer within the time; the request is left to a thread that ends with the process.
    """
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=contextvars.copy_context().run, args=(work,), name="paceline-hub", daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():  # the request itself ended with this error
            raise
        raise TimeoutError(f"no answer within {seconds:g} s") from None


def is_unreachable(error: BaseException) -> bool:
    """True if no server answered (refused connection, unknown host, timeout). Supports errors of any HTTP library."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"ConnectError", "ConnectionError", "TimeoutException", "Timeout", "TimeoutError"})


def make_branch(repo_id: str, revision: str | None, token: str | None) -> None:
    """Creates the branch to push to. References such as `refs/pr/1`, and main, already exist.

    Raises: HubError.
    """
    if revision is None or revision == "main" or revision.startswith("refs/"):
        return
    api = require("huggingface_hub", "hub").HfApi()
    try:
        api.create_branch(repo_id, branch=revision, token=token, exist_ok=True)
    except Exception as error:
        raise HubError(
            f"hub_revision={revision!r}: the branch could not be created in {repo_id} ({in_words(error)}); use a branch"
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
    """Uploads files in one atomic commit.

    Args:
        files: maps paths in the repository to files.
        owned: a folder in the repository; its files that are not in `files` are deleted.

    Returns: huggingface_hub's CommitInfo. If `files` has weights, weight shards of earlier pushes are deleted.
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
    """Returns an error and its causes on one line, with secrets masked."""
    words = describe_error(error)
    cause, first = error.__cause__, words.partition(": ")[2]
    return words if cause is None or (first and first in str(cause)) else f"{words} <- {in_words(cause)}"
