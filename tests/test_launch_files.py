"""The files of launch/: what they start parses with our own command line, and the Slurm script does what it says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed import run as torchrun

from paceline import HfArgumentParser, TrainingArguments
from paceline.cli.launch import default_options

FOLDER = Path(__file__).resolve().parent.parent / "launch"
OPERATOR = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "first"}
SKY = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "first\nsecond",
    "OUTPUT_DIR": "s3://bucket/team/digits",
}


def read(name: str) -> dict[str, Any]:
    content = yaml.safe_load((FOLDER / name).read_text("utf-8"))
    assert isinstance(content, dict)
    return content


def check_words(words: list[str]) -> None:
    """`paceline launch` with these words starts eight processes on the second of two nodes, with options that exist."""
    assert words[:2] == ["paceline", "launch"]
    parsed = torchrun.parse_args([*default_options(words[2:]), *words[2:]])
    assert (str(parsed.nnodes), str(parsed.nproc_per_node), str(parsed.node_rank)) == ("2", "8", "1")
    assert parsed.master_addr == "first"
    assert not parsed.standalone
    assert parsed.training_script == "launch/train.py"
    check_options(parsed.training_script_args)


def check_options(words: list[str]) -> None:
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    assert args.output_store == "s3://bucket/team/digits"
    assert args.resume_from_checkpoint == "auto"
    assert args.parallel == "fsdp"


@pytest.fixture
def _operator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OPERATOR.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("_operator")
def test_pytorchjob() -> None:
    job = read("kubernetes_pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    specs = job["spec"]["pytorchReplicaSpecs"]
    assert sum(spec["replicas"] for spec in specs.values()) == 2
    assert set(specs) == {"Master", "Worker"}
    for spec in specs.values():
        (container,) = spec["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == job["spec"]["nprocPerNode"]
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
        check_words(container["command"])


@pytest.mark.usefixtures("_operator")
def test_trainjob() -> None:
    job = read("kubernetes_trainjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    assert trainer["numNodes"] == 2
    check_words([*trainer["command"], *trainer["args"]])


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
def test_skypilot(tmp_path: Path) -> None:
    task = read("skypilot.yaml")
    assert task["resources"]["use_spot"] is True
    printed = 'paceline() { printf "%s\\n" paceline "$@"; }\n' + task["run"]
    printed_words = subprocess.check_output(["bash", "-ec", printed], env={**os.environ, **SKY}, text=True)
    check_words(printed_words.splitlines())
    subprocess.run(["bash", "-n", "-c", task["setup"]], check=True)


STUBS = {
    "srun": '#!/bin/bash\necho "$@" >> "$CALLS"\ntrap "echo told >> $CALLS; exit 0" USR1\n'
    'echo $$ > "$STEP"\nfor _ in $(seq 600); do sleep 0.05; [ -e "$STEP.end" ] && exit 3; done\n',
    "scancel": '#!/bin/bash\necho "scancel $*" >> "$CALLS"\nkill -USR1 "$(cat "$STEP")"\n',
    "scontrol": '#!/bin/bash\necho "scontrol $*" >> "$CALLS"\n',
}


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.parametrize("is_out_of_time", [True, False])
def test_slurm(tmp_path: Path, is_out_of_time: bool) -> None:
    """With stand-ins for Slurm's commands: USR1 goes to the processes, and the job is requeued when they have ended."""
    script = FOLDER / "slurm.sbatch"
    for name, text in STUBS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    calls, step = tmp_path / "calls", tmp_path / "step"
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(calls),
        "STEP": str(step),
        "SLURM_JOB_ID": "7",
        "OUTPUT_DIR": "s3://bucket/team/digits",
    }
    process = subprocess.Popen(["bash", str(script)], env=environment, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not (step.exists() and step.read_text().strip()) and time.monotonic() < until:
        time.sleep(0.02)
    if is_out_of_time:
        process.send_signal(signal.SIGUSR1)
    else:
        step.with_name("step.end").touch()
    assert process.wait(60) == (0 if is_out_of_time else 3)
    started, *rest = calls.read_text().splitlines()
    assert rest == (["scancel --signal=USR1 7", "told", "scontrol requeue 7"] if is_out_of_time else [])
    words = started.split()
    check_options(words[words.index("launch/train.py") + 1 :])
    directives = [line.split()[1] for line in script.read_text("utf-8").splitlines() if line.startswith("#SBATCH")]
    assert {"--requeue", "--signal=B:USR1@300", "--open-mode=append", "--ntasks-per-node=8"} <= set(directives)
