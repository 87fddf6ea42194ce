"""`paceline launch`: real processes through torchrun, and what is typed wrong."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.cli.launch import default_options
from paceline.cli.main import main

SCRIPT = """
import sys
from pathlib import Path
from paceline import TrainingArguments
args = TrainingArguments(use_cpu=True)
assert args.parallel_mode.value == "distributed"
Path(sys.argv[1], str(args.process_index)).write_text(f"{args.world_size} {args.local_process_index} {args.device}")
"""


@pytest.mark.slow
def test_a_script_runs_on_several_processes(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    words = ["launch", "--nproc-per-node", "2", str(tmp_path / "job.py"), str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "paceline", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["2 0 cpu", "2 1 cpu"]


@pytest.mark.slow
def test_a_job_on_several_processes_is_started_over_by_one_of_them(tmp_path: Path) -> None:
    """It moves the earlier run aside once, and speaks for all."""
    assert main(["init", "module", str(tmp_path / "job.yaml")]) == 0
    (tmp_path / "runs" / "job").mkdir(parents=True)
    (tmp_path / "runs" / "job" / "job.json").write_text('{"identity": {}}')
    words = ["launch", "--nproc-per-node", "2", "-m", "paceline", "train", "job.yaml", "--max_steps", "2", "--fresh"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["job", "job-earlier-1"]
    for text in ("The earlier run is now in", "everything goes to", "are saved to", "The curves:"):
        assert done.stdout.count(text) == 1, done.stdout
    assert done.stderr.count("did not find any unused parameters") == 1, done.stderr  # of torch's C++ code


def test_what_is_not_said() -> None:
    assert default_options(["--nproc-per-node=2", "job.py", "--nnodes", "3"]) == ["--standalone"]
    assert default_options(["--nnodes=2", "--rdzv-backend=c10d", "--nproc-per-node", "4", "job.py"]) == []


def test_what_an_operator_says_in_variables_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "2")
    assert default_options(["--nproc-per-node=2", "job.py"]) == []
    monkeypatch.setenv("PET_NPROC_PER_NODE", "8")
    assert default_options(["job.py"]) == []
    monkeypatch.delenv("PET_NNODES")
    assert default_options(["job.py"]) == ["--standalone"]


def test_without_accelerator_the_number_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    assert main(["launch", "job.py"]) == 2
    assert "set the number of processes with --nproc-per-node" in capsys.readouterr().err
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert default_options(["job.py"]) == ["--standalone", "--nproc-per-node=4"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nproc-per-nodes=2", "job.py"], "there is no option --nproc-per-nodes; did you mean '--nproc-per-node'?"),
        (["--max-restart-s", "2", "job.py"], "did you mean '--max-restarts'?"),
        (["--nproc-per-node", "x", "job.py"], "--nproc-per-node=x is invalid: expected a number of processes"),
        (["--nproc-per-node=0", "job.py"], "expected a number of processes from 1 on"),
        (["--nproc-per-node=1", "--nnodes=2:1", "job.py"], "--nnodes=2:1 is invalid"),
        (["--nproc-per-node=1", "--max-restarts", "x", "job.py"], "invalid int value: 'x'"),
        (["--nproc-per-node=1", "--rdzv-backend=foo", "job.py"], "torchrun rejected its options"),
        (["--nproc-per-node=1"], "launch needs a script"),
        (["--nproc-per-node=1", "jbo.py"], "jbo.py cannot be read: there is no such script; did you mean 'job.py'?"),
        (["--nproc-per-node=1", "folder"], "folder is a folder; expected a script"),
        (["--nproc-per-node=1", "job.yaml"], "-m paceline train job.yaml"),
    ],
)
def test_what_is_typed_wrong_is_said_in_one_line(
    tmp_path: Path, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.py").write_text("raise SystemExit(3)")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["launch", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    own = [line for line in said.splitlines() if "torch/distributed/run.py" not in line]  # torch 2.14 warns
    assert len(own) == 1


def test_torch_that_is_missing_is_said_in_one_line() -> None:
    code = "import sys; sys.modules['torch'] = None; from paceline.cli.main import main; "
    code += "sys.exit(main(['launch', 'job.py']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert 'pip install "paceline[torch]"' in done.stderr


def test_without_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch"]) == 2
    assert "needs a script" in capsys.readouterr().err
    assert main(["launch", "--help"]) == 0
    assert "--max-restarts" in capsys.readouterr().out
