"""`paceline launch --on`: the words that a job is started with, what is refused, and what is said."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from paceline.cli.launch_files import SERVICES, read_request, render
from paceline.cli.main import main

JOB = "model: gpt2\ndata: corpus.txt\nmax_steps: 5\n"
HOSTILE = [
    "a b",
    "$(touch x)",
    "${{ x }}",
    "$HOME",
    "'",
    '"',
    "\\",
    "#",
    ": ",
    "`id`",
    "ü",
    "%",
    "{x}",
    "- a",
    "1e-3",
    "on",
]
needs_shell = pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB)
    Path("train.py").write_text("")


def words_of(service: str, text: str) -> list[str]:
    """Returns the words that a file starts the job with, from `train` or the script on."""
    if text.startswith('"""'):
        (found,) = (
            ast.literal_eval(node.value)
            for node in ast.parse(text).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "WORDS"
        )
        return [str(word) for word in found]
    if service == "kubernetes":
        args = yaml.safe_load(text)["spec"]["trainer"]["args"]
        assert all(isinstance(word, str) for word in args)
        return [word.replace("$$", "$") for word in args[2:]]
    if service == "slurm":
        lines = text[text.index("srun") : text.index("step=$!")].rstrip().removesuffix("&")
    else:
        content = yaml.safe_load(text)
        if service == "vertex":
            lines = content["workerPoolSpecs"][0]["containerSpec"]["args"][0]
        elif service == "azure_ml":
            lines = content["command"]
        else:
            lines = content["run"] if service == "skypilot" else content["commands"][0]
        assert "$(touch" not in lines
        assert "${{" not in lines
    shown = 'show() { printf "%s\\0" "$@"; }\nexec() { "$@"; }\nsrun() { show "$@"; }\npython() { show "$@"; }\n'
    shown += 'paceline() { show "$@"; }\n'
    output = subprocess.run(["bash", "-c", shown + lines], capture_output=True, check=True, env=os.environ).stdout
    words = output.decode().split("\0")[:-1]
    return words[words.index("-m") if "-m" in words else words.index("train.py") :]


@needs_shell
@pytest.mark.parametrize("service", SERVICES)
def test_words_survive_every_file(service: str) -> None:
    words = ["--on", service, "job.yaml", "--nodes=1"]
    for index, value in enumerate(HOSTILE):
        words += [f"--model.key{index}", f"x{value}"] if value in ("'", '"', "`id`", "{x}", ": ", "- a") else []
    job = read_request([*words, "--run_name", " ".join(HOSTILE)])
    assert words_of(service, render(job)) == job.words
    script = read_request(["--on", service, "train.py", *HOSTILE])
    assert words_of(service, render(script)) == ["train.py", *HOSTILE]


@pytest.mark.parametrize("service", SERVICES)
def test_a_file_is_written_once(service: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "--on", service, "--gpus", "8", "job.yaml"]
    assert main(words) == 0
    said = capsys.readouterr().out
    (path,) = Path().glob("job_*")
    assert f"wrote {path}" in said
    assert "fill in:" in said
    assert str(path) in said.splitlines()[-1]
    assert ("s3://bucket/run" in said) == (not SERVICES[service].shares_disk)
    text = path.read_text()
    assert "{{" not in text
    assert "8 GPUs" in text
    path.write_text("mine")
    assert main(words) == 2
    assert "is not overwritten" in capsys.readouterr().err
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "slrum", "job.yaml"], "did you mean 'slurm'?"),
        (["--on", "slurm"], "needs a configuration or a script"),
        (["--on", "slurm", "--node", "2", "job.yaml"], "did you mean '--nodes'?"),
        (["--on", "slurm", "job.yaml", "--nodes", "0"], "--nodes 0: expected a whole number"),
        (["--on", "slurm", "job.yaml", "--gpus", "²"], "--gpus ²: expected a whole number"),
        (["--on", "slurm", "job.yaml", "--nodes", "2", "--nodes", "3"], "--nodes is given twice"),
        (["--on", "slurm", "job.yaml", "--image", "x"], "names no image"),
        (["--on", "modal", "job.yaml", "--nodes", "2"], "has one machine"),
        (["--on", "vertex", "job.yaml", "--gpus", "3"], "have 1, 2, 4, 8"),
        (["--on", "kubernetes", "job.yaml", "--image", "x; rm"], "not the name of a container image"),
        (["--on", "slurm", "job.yaml", "--run_name", "a\nb"], "control character"),
        (["--on", "slurm", "job.yaml", "--run_name", "a\u2028b"], "control character"),
        (["--on", "slurm", "job.yaml", "--hub_token", "hf_" + "a" * 34], "a secret has no place in a file"),
        (["--on", "slurm", "job.yaml", "--learning_rat", "1"], "did you mean"),
        (["--on", "slurm", "job.yaml", "--framework", "tf"], "TensorFlow"),
        (["--on", "slurm", "job.yaml", "--fresh"], "begin anew at every restart"),
        (["--on", "slurm", "none.py"], "no such script"),
        (["--on", "slurm", "none.yaml"], "cannot be read"),
        (["--on", "slurm", "job.txt"], "expected a configuration"),
        (["--on", "slurm", "job.yaml", "--output", "none/x"], "cannot be written"),
    ],
)
def test_refusals(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *words]) == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["job.yaml", "train.py"]


def test_a_job_outside_of_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "job.yaml")
    assert main(["launch", "--on", "dstack", path]) == 2
    assert "only what lies below the current folder" in capsys.readouterr().err
    assert main(["launch", "--on", "slurm", path]) == 0


def test_options_of_a_script_are_its_own() -> None:
    request = read_request(["--on", "slurm", "--nodes=2", "train.py", "--output", "x", "--nodes", "7"])
    assert request.nodes == 2
    assert request.rest == ("--output", "x", "--nodes", "7")


@pytest.mark.parametrize(
    ("stem", "name"), [("on", "job-on"), ("7 b_C", "job-7-b-c"), ("ü", "job"), ("x" * 99, "x" * 40)]
)
def test_the_name_is_valid_everywhere(stem: str, name: str) -> None:
    Path(f"{stem}.py").write_text("")
    assert read_request(["--on", "kubernetes", f"{stem}.py"]).name == name


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--on", "slurm", "--help"]) == 0
    assert "--on SERVICE" in capsys.readouterr().out


def test_templates_are_shipped() -> None:
    import tomllib

    import paceline

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["paceline"]
    folder = Path(paceline.__file__).parent
    shipped = {path.stem for pattern in patterns for path in folder.glob(pattern) if path.suffix == ".txt"}
    assert shipped == set(SERVICES)
