"""Real processes that train together, for tests: started as torchrun starts them, connected by gloo."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import warm

SUPPORT = Path(__file__).resolve().parent
SOURCES = SUPPORT.parent.parent / "src"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def environment_of(rank: int, size: int, port: int) -> dict[str, str]:
    """Returns the environment variables that torchrun sets for one process."""
    return {
        **os.environ,
        "PYTHONPATH": f"{SOURCES}{os.pathsep}{SUPPORT}",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # ninja, which DeepSpeed calls
        "DS_ACCELERATOR": "cpu",
        "PYTHONWARNINGS": "ignore::FutureWarning",  # DeepSpeed's, by the thousand: more than a pipe holds unread
        "WORLD_SIZE": str(size),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def start(script: str, size: int, *words: str) -> list[Any]:
    """Start `size` processes of a script of tests/support."""
    port = free_port()
    words = (str(SUPPORT / script), *words)
    return [warm.start(words, env=environment_of(rank, size, port)) for rank in range(size)]


def finish(processes: Sequence[Any], timeout: float = 240, codes: tuple[int, ...] = (0,)) -> list[str]:
    """Wait for all of them; what each wrote to standard error. The first exit code that is not expected fails.

    All are read at once: one whose pipe is full waits, and the others wait for it.
    """
    texts = [""] * len(processes)
    pool = ThreadPoolExecutor(len(processes))
    try:
        reads = {pool.submit(process.communicate, timeout=timeout): rank for rank, process in enumerate(processes)}
        for read in as_completed(reads):
            rank, (_, text) = reads[read], read.result()
            code = processes[rank].returncode
            assert code in codes, f"process {rank} ended with {code}:\n{text}"
            texts[rank] = text
    finally:
        for process in processes:
            process.kill()
        pool.shutdown()  # before each is read to its end: two readers would take parts of one text
        for process in processes:
            process.communicate()
    return texts


def run(script: str, size: int, *words: str) -> list[str]:
    """Run a script on several processes; the standard error of each."""
    return finish(start(script, size, *words))
