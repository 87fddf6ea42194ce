"""Saves the compiled code of torch.compile to a folder, from which later processes load it."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from pathlib import Path

import torch
from torch import distributed, nn

logger = logging.getLogger(__name__)

SUFFIX = ".torch_compile"


class CompileCache:
    """The artifacts of torch.compile for one model, in one file per process.

    Torch checks each artifact against the code, the shapes and its own settings before it uses it; a stale file costs
    the time to read it. Loading executes what the file holds, as torch's own cache does: the folder must be trusted.
    Files are replaced as a whole, and errors of the file system are logged and do not end a run.

    Args:
        folder: created when artifacts are saved.
        model: its class, and the names, shapes and dtypes of its parameters, are part of the file's name, as are the
            release of torch, the kind of device, and the rank.
    """

    def __init__(self, folder: str, model: nn.Module) -> None:
        self.path = Path(folder, file_name(model))
        self._known = 0  # bytes in the file

    def load(self) -> None:
        """Copies the artifacts of the file into torch's cache."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning(
                "compile_cache_dir: %s cannot be read, so the model is compiled anew (%s).", self.path, error
            )
            return
        found = torch.compiler.load_cache_artifacts(content)
        if found is None:  # torch logs the reason
            logger.warning("compile_cache_dir: torch cannot use %s, and it will be replaced.", self.path)
            return
        self._known = len(content)
        logger.info("Loaded compiled code of %d graphs from %s.", len(found.inductor_artifacts), self.path)

    def save(self) -> None:
        """Writes all artifacts of this process, unless none were added."""
        found = torch.compiler.save_cache_artifacts()
        if found is None or len(found[0]) <= self._known:
            return
        content, info = found
        part = self.path.with_suffix(f".{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(content)
            part.replace(self.path)
        except OSError as error:
            part.unlink(missing_ok=True)
            logger.warning("compile_cache_dir: %s cannot be written (%s).", self.path, error)
            return
        self._known = len(content)
        logger.info("Saved compiled code of %d graphs to %s.", len(info.inductor_artifacts), self.path)


def file_name(model: nn.Module) -> str:
    """Returns the name of the file of a model and this process."""
    parameters = list(model.named_parameters())
    facts = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in parameters]
    digest = hashlib.sha256(repr((torch.__version__, facts)).encode()).hexdigest()[:16]
    device = parameters[0][1].device if parameters else torch.device("cpu")
    name_device = getattr(torch.get_device_module(device), "get_device_name", None)
    kind = device.type if name_device is None else name_device(device)
    rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
    words = "-".join((type(model).__name__, torch.__version__, kind, digest, f"rank{rank}"))
    return re.sub(r"[^\w.+-]", "_", words) + SUFFIX
