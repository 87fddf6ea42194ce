"""The files of launch/: what they start parses with our own command line, and the Slurm script does what it says."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed import run as torchrun

from paceline import HfArgumentParser, TrainingArguments
from paceline.cli.launch import default_options
from paceline.cli.launch_files import Request, render
from paceline.core.optional import is_installed

FOLDER = Path(__file__).resolve().parent.parent / "launch"
OPERATOR = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "first"}
SKY = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "first\nsecond",
}
DSTACK = {
    "DSTACK_NODES_NUM": "2",
    "DSTACK_GPUS_PER_NODE": "8",
    "DSTACK_NODE_RANK": "1",
    "DSTACK_MASTER_NODE_IP": "first",
}
needs_shell = pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")


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


def check_single(words: list[str]) -> None:
    """`paceline launch` with these words starts eight processes on one machine, with options that exist."""
    assert words[:2] == ["paceline", "launch"]
    parsed = torchrun.parse_args([*default_options(words[2:]), *words[2:]])
    assert (parsed.standalone, str(parsed.nproc_per_node), parsed.training_script) == (True, "8", "launch/train.py")
    check_options(parsed.training_script_args)


def words_of(script: str, environment: dict[str, str]) -> list[str]:
    """Returns the command line that a shell script makes of `paceline`; `exec` and `cd` have no effect."""
    printed = 'paceline() { printf "%s\\n" paceline "$@"; }\nexec() { "$@"; }\ncd() { :; }\n' + script
    return subprocess.check_output(["bash", "-ec", printed], env={**os.environ, **environment}, text=True).splitlines()


def module_of(name: str) -> Any:
    """Imports a Python file of the folder."""
    spec = importlib.util.spec_from_file_location(f"launch_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_options(words: list[str]) -> None:
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    assert args.output_store == "s3://bucket/team/digits"
    assert args.resume_from_checkpoint == "auto"
    assert args.parallel == "fsdp"


# file -> service; the other files of the folder have no template
RENDERED = {
    "slurm.sbatch": "slurm",
    "kubernetes_trainjob.yaml": "kubernetes",
    "skypilot.yaml": "skypilot",
    "modal_app.py": "modal",
    "dstack.yaml": "dstack",
    "sagemaker_job.py": "sagemaker",
    "vertex_ai.yaml": "vertex",
    "azure_ml.yaml": "azure_ml",
    "hf_jobs.py": "hf_jobs",
}


def rendered(name: str) -> str:
    """Returns what `paceline launch --on` writes for launch/train.py."""
    url = "s3://bucket/team/digits"
    rest = ("--output_dir", url, "--resume_from_checkpoint", "auto", "--parallel", "fsdp")
    nodes = 1 if name in ("modal_app.py", "hf_jobs.py") else 2
    job = Request(RENDERED[name], Path("launch/train.py"), rest, nodes, 8, None, Path("launch", name), url)
    return render(job).replace("paceline[torch,s3]", "paceline[demo,s3]")  # the script imports scikit-learn


@pytest.mark.parametrize("name", RENDERED)
def test_the_files_are_what_the_command_writes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER.parent)
    assert (FOLDER / name).read_text("utf-8") == rendered(name)


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


@needs_shell
def test_skypilot() -> None:
    task = read("skypilot.yaml")
    assert task["resources"]["use_spot"] is True
    check_words(words_of(task["run"], SKY))
    subprocess.run(["bash", "-n", "-c", task["setup"]], check=True)


STUBS = {
    "srun": '#!/bin/bash\necho "$@" >> "$CALLS"\ntrap "echo told >> $CALLS; exit 0" USR1\n'
    'echo $$ > "$STEP"\nfor _ in $(seq 600); do sleep 0.05; [ -e "$STEP.end" ] && exit 3; done\n',
    "scancel": '#!/bin/bash\necho "scancel $*" >> "$CALLS"\nkill -USR1 "$(cat "$STEP")"\n',
    "scontrol": '#!/bin/bash\necho "scontrol $*" >> "$CALLS"\n',
}


@needs_shell
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


@needs_shell
def test_dstack() -> None:
    task = read("dstack.yaml")
    assert (task["type"], task["nodes"], task["resources"]["gpu"]) == ("task", 2, "H100:8")
    (command,) = task["commands"]
    check_words(words_of(command, DSTACK))


@needs_shell
def test_vertex_ai() -> None:
    """Vertex AI counts machines in RANK and WORLD_SIZE, which torchrun sets anew for processes."""
    job = read("vertex_ai.yaml")
    assert [pool["replicaCount"] for pool in job["workerPoolSpecs"]] == [1, 1]
    machines = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "first", "MASTER_PORT": "3333"}
    for pool in job["workerPoolSpecs"]:
        container = pool["containerSpec"]
        assert container["command"] == ["bash", "-c"]
        check_words(words_of(container["args"][0], machines))


@needs_shell
def test_azure_ml() -> None:
    job = read("azure_ml.yaml")
    assert job["distribution"] == {"type": "pytorch", "process_count_per_instance": 8}
    assert job["resources"]["instance_count"] == 2
    script = 'python() { printf "%s\\n" "$@"; }\n' + job["command"]
    script_name, *options = words_of(script, {})
    assert script_name == "launch/train.py"
    check_options(options)


def test_modal(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package, whose decorators return the functions."""
    asked: dict[str, Any] = {}

    def function(**options: Any) -> Any:
        asked.update(options)
        return lambda body: body

    class Image:
        pip_install = add_local_dir = lambda self, *words, **options: self

    app = types.SimpleNamespace(function=function, local_entrypoint=lambda: lambda body: body)
    image = types.SimpleNamespace(debian_slim=lambda python_version: Image())
    secret = types.SimpleNamespace(from_name=str)
    modal = types.SimpleNamespace(App=lambda name: app, Image=image, Secret=secret)
    monkeypatch.setitem(sys.modules, "modal", modal)  # type: ignore[arg-type]
    module = module_of("modal_app")
    assert (asked["gpu"], asked["retries"], asked["timeout"]) == ("H100:8", 3, 86400)
    started: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda words, **options: started.append(words))
    module.train()
    check_single(started[0])


@pytest.mark.skipif(not is_installed("huggingface_hub"), reason="needs huggingface_hub")
def test_hf_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments are bound to the signature of the installed package."""
    import huggingface_hub

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    job = module_of("hf_jobs").job_of("h200x8")
    inspect.signature(huggingface_hub.run_job).bind(**job)
    assert "h200x8" in {str(each.value) for each in huggingface_hub.JobHardware}
    assert job["secrets"]["AWS_ACCESS_KEY_ID"] == "key"
    check_single(job["command"])


@needs_shell
def test_sagemaker(tmp_path: Path) -> None:
    """The request is checked with the model of the service in botocore, if it is installed, and the command is run."""
    module = module_of("sagemaker_job")
    job = module.job_of("arn:aws:iam::123456789012:role/training", "paceline")
    if is_installed("botocore"):
        from botocore.session import Session
        from botocore.validate import ParamValidator

        shape = Session().get_service_model("sagemaker").operation_model("CreateTrainingJob").input_shape
        assert not ParamValidator().validate(job, shape).generate_report()
    machines = tmp_path / "resourceconfig.json"
    machines.write_text(json.dumps({"current_host": "second", "hosts": ["second", "first"]}))
    (command,) = job["AlgorithmSpecification"]["ContainerArguments"]
    command = command.replace("/opt/ml/input/config/resourceconfig.json", machines.as_posix())
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    check_words(words_of(command, {"PATH": path}))


INSTRUCTION = re.compile(r"(FROM|ARG|ENV|RUN|WORKDIR|COPY|USER|CMD) (.+)")


@pytest.mark.parametrize("kind", ["cpu", "cuda", "rocm"])
def test_docker(kind: str) -> None:
    """Every line is an instruction, what is copied exists, and the extras do."""
    root = FOLDER.parent
    text = (FOLDER / "docker" / f"{kind}.Dockerfile").read_text("utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = [INSTRUCTION.fullmatch(line) for line in lines]
    assert all(found), lines
    steps = [(match[1], match[2]) for match in found if match]
    assert steps[0][0] == "FROM"
    assert [what for name, what in steps if name == "USER"] == ["trainer"]
    for name, what in steps:
        if name == "COPY":
            *sources, _ = what.split()
            assert all((root / source).exists() for source in sources)
        if name == "RUN":
            subprocess.run(["bash", "-n", "-c", what], check=True)
    project = (root / "pyproject.toml").read_text("utf-8")
    extras = re.findall(r'pip install "\.\[(.*)\]"', text)[0].split(",")
    assert all(re.search(rf"^{extra} = ", project, re.MULTILINE) for extra in extras)


def test_devcontainer() -> None:
    settings = json.loads((FOLDER.parent / ".devcontainer" / "devcontainer.json").read_text("utf-8"))
    target = settings["postCreateCommand"].removeprefix("make ")
    assert re.search(rf"^{target}:", (FOLDER.parent / "Makefile").read_text("utf-8"), re.MULTILINE)
