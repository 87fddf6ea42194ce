"""Python programs started from a process that has imported the large libraries, so that a start costs no import.

A program is given as the words after `python`: a script, `-m module` or `-c code`, and its arguments. It runs in a
forked child with its own arguments, environment, folder, streams and `__main__`, and ends as any interpreter does.
What a program may not find imported, and what reads its environment when it is imported, is started with `subprocess`.

    python warm.py SOCKET MODULE...     the server: one for each process of pytest, started with its first program

A program that starts others by `sys.executable` can have them forked too: see `run`.
"""

from __future__ import annotations

import array
import atexit
import gc
import importlib
import json
import os
import random
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

SUPPORT = Path(__file__).resolve().parent
SOURCES = SUPPORT.parent.parent / "src"
# Seconds of imports for most programs of tests. No library that builds on transformers' Trainer is among them: under
# `paceline.drop_in` they must be imported after its installation.
PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.utils.data",
    "paceline.pytorch.trainer",
    "transformers.trainer_seq2seq",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "datasets",
    "deepspeed",  # which accelerate imports with every Trainer of transformers
    "peft",
    "sklearn.metrics",
)
# What stands for Python in a program whose own programs are forked too: it waits for one, and ends as that one does.
STAND_IN = """#!{python} -ISE
import array, json, os, socket, sys
channel = socket.socket(socket.AF_UNIX)
channel.connect({address!r})
job = {{"words": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}}
message = json.dumps(job).encode() + b"\\n"
rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1, 2]))
channel.sendall(message[channel.sendmsg([message], [rights]):])
answers = channel.makefile().read().split()
status = int(answers[1])
if status < 0:
    os.kill(os.getpid(), -status)
os._exit(status)
"""
IS_SUPPORTED = sys.platform == "linux"  # elsewhere a fork of a process with these libraries is not safe


class Program:
    """A program that runs in a forked child; the part of `subprocess.Popen` that tests use."""

    def __init__(self, words: Sequence[str], cwd: Path | None, env: Mapping[str, str], is_nested: bool) -> None:
        self.args = list(words)
        self.returncode: int | None = None
        self._texts: list[str] = []
        self._open = ExitStack()
        self._streams = [
            self._open.enter_context(tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115
            for _ in ("output", "errors")
        ]
        self._channel = socket.socket(socket.AF_UNIX)
        self._channel.connect(server().address)
        env = {**env, "PYTHON_OF_PROGRAMS": server().stand_in} if is_nested else dict(env)
        job = {"words": self.args, "cwd": str(cwd or os.getcwd()), "env": env}
        numbers = array.array("i", [stream.fileno() for stream in self._streams])
        message = json.dumps(job).encode() + b"\n"
        sent = self._channel.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)])
        self._channel.sendall(message[sent:])
        self._answers = self._channel.makefile()
        self.pid = int(self._answers.readline())

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._channel], [], [], 0)[0]:
            self._read_end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._channel], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._read_end()
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; returns what it wrote to standard output and standard error."""
        self.wait(timeout)
        return self._texts[0], self._texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read_end(self) -> None:
        text = self._answers.readline()
        self.returncode = int(text) if text else -signal.SIGKILL  # the server is gone, and its children with it
        self._answers.close()
        self._channel.close()
        for stream in self._streams:
            stream.seek(0)
            self._texts.append(stream.read())
        self._open.close()


def start(
    words: Sequence[str], cwd: Path | None = None, env: Mapping[str, str] | None = None, is_nested: bool = False
) -> Any:
    """Start a program: a `Program`, or a `subprocess.Popen` on systems where a fork is not safe.

    Args:
        words: those after `python` on a command line.
        cwd: its folder; the present one if None.
        env: its environment; this process's if None.
        is_nested: what it starts by `sys.executable` is forked too. To kill that ends the program behind it by SIGKILL.
    """
    env = os.environ if env is None else env
    if IS_SUPPORTED:
        return Program(words, cwd, env, is_nested)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *words], cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True)


def run(
    words: Sequence[str], cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float | None = None,
    is_nested: bool = False,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a program to its end, as `subprocess.run` with captured text; it is killed when the time is up."""
    program = start(words, cwd, env, is_nested)
    try:
        output, errors = program.communicate(timeout=timeout)
    except BaseException:  # the time limit of the test is one too
        program.kill()
        program.communicate()
        raise
    return subprocess.CompletedProcess(list(words), program.returncode, output, errors)


class Server:
    """The server process of this process. It ends, and its children with it, when its standard input is closed."""

    def __init__(self, preloaded: Sequence[str] = PRELOADED) -> None:
        self.folder = tempfile.mkdtemp(prefix="paceline-warm-")
        self.address, self.stand_in = f"{self.folder}/socket", f"{self.folder}/python"
        Path(self.stand_in).write_text(STAND_IN.format(python=sys.executable, address=self.address))
        os.chmod(self.stand_in, 0o700)
        self.owner = os.getpid()
        env = {**os.environ, "PYTHONPATH": str(SOURCES), "DS_ACCELERATOR": "cpu"}
        env["PYTHONWARNINGS"] = "ignore::FutureWarning"
        command = [sys.executable, __file__, self.address, *preloaded]
        errors = Path(self.folder, "errors.txt")
        with errors.open("w") as stream:
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=stream, text=True)
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            raise RuntimeError(f"The server of programs ended with {self.process.wait()}:\n{errors.read_text()}")
        atexit.register(self.end)

    def end(self) -> None:
        if os.getpid() != self.owner:
            return
        self.process.communicate()


_servers: list[Server] = []


def server() -> Server:
    """The server of this process, started when it is first needed."""
    if not _servers or _servers[0].owner != os.getpid() or _servers[0].process.poll() is not None:
        _servers[:] = [Server()]
    return _servers[0]


# ---- in the server process


class Job:
    """A program to run, received on a connection: its words, folder, environment and streams."""

    def __init__(self, channel: socket.socket) -> None:
        text, streams, _, _ = socket.recv_fds(channel, 1 << 16, 2)
        while not text.endswith(b"\n"):
            text += channel.recv(1 << 16)
        self.channel, self.streams = channel, streams
        self.fields: dict[str, Any] = json.loads(text)


def serve(address: str) -> Job | None:
    """Fork a child for each job. Returns the job in a child, and None in the server when its input is closed."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal is for pytest
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    running: dict[int, socket.socket] = {}
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([sys.stdin, listener, woken, *watched(running)], [], [])
        if sys.stdin in ready:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            return None
        if woken in ready:
            woken.recv(1 << 12)
            report_ends(running)
        for pid in [pid for pid, channel in running.items() if channel in ready]:
            os.kill(pid, signal.SIGKILL)  # nobody waits for it any more
            running[pid].close()
        if listener in ready:
            job = Job(listener.accept()[0])
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for each in (listener, woken, wake, job.channel, *running.values()):
                    each.close()
                return job
            for stream in job.streams:
                os.close(stream)
            running[pid] = job.channel
            answer(job.channel, pid)


def watched(running: dict[int, socket.socket]) -> list[socket.socket]:
    """The connections that are open on this side."""
    return [channel for channel in running.values() if channel.fileno() >= 0]


def report_ends(running: dict[int, socket.socket]) -> None:
    """Tell of each child that has ended, with its exit status, or the negative number of the signal."""
    for pid in list(running):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            with running.pop(pid) as channel:
                answer(channel, os.waitstatus_to_exitcode(status))


def answer(channel: socket.socket, number: int) -> None:
    try:
        channel.sendall(f"{number}\n".encode())
    except OSError:
        pass  # it is closed, for nobody waits for the child


def become(job: Job) -> None:
    """Give this child what the program would find in an interpreter of its own."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, stream in enumerate(job.streams, start=1):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(job.fields["env"])
    sys.executable = os.environ.get("PYTHON_OF_PROGRAMS", sys.executable)
    os.chdir(job.fields["cwd"])
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *INSTALLED]
    importlib.invalidate_caches()
    atexit.register(gc.freeze)  # run last: searching all that was preloaded as the interpreter ends takes 2 s
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def execute(words: list[str]) -> None:
    """Run a program as `__main__`."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    if words[0] == "-c":
        sys.argv, code, name = ["-c", *words[2:]], words[1], "<string>"
        sys.path.insert(0, "")
    else:
        sys.argv, code, name = words, Path(words[0]).read_text(encoding="utf-8"), words[0]
        main.__file__ = words[0]
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
    exec(compile(code, name, "exec"), vars(main))


INSTALLED = [path for path in sys.path if Path(path).resolve() not in (SUPPORT, SOURCES)]

if __name__ == "__main__":
    for each in sys.argv[2:]:
        try:
            importlib.import_module(each)
        except ImportError:  # an optional package that is not there
            pass
    received = serve(sys.argv[1])
    if received is None:
        shutil.rmtree(Path(sys.argv[1]).parent, ignore_errors=True)
    else:
        become(received)
        execute(received.fields["words"])
