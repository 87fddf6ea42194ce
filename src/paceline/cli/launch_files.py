"""`paceline launch --on SERVICE`: writes the file that starts a job on a cluster or a cloud service."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import yaml

from paceline.args.places import is_url
from paceline.args.secrets import mask_command
from paceline.cli.config import read_job
from paceline.cli.display import say
from paceline.cli.errors import UsageError, suggest
from paceline.cli.launch_words import JOB_SUFFIXES
from paceline.cli.texts import LAUNCH

OPTIONS = ("--on", "--nodes", "--gpus", "--image", "--output")
PLACEHOLDER = re.compile(r"^( *(?:- )?)\{\{(\w+)\}\}|\{\{(\w+)\}\}", re.MULTILINE)
IMAGE = "registry.example.com/team/paceline:latest"
# YAML scalars that need no quotes in any version of YAML: some parsers read 1e-3 and `on` as something else than text
PLAIN = re.compile(r"-{0,2}[A-Za-z/.](?![0-9])[A-Za-z0-9_./:@-]*")
RESERVED = ("y", "n", "yes", "no", "on", "off", "true", "false", "null", ".inf", "-.inf", ".nan")
EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "abfss": "azure", "az": "azure"}


@dataclass(frozen=True)
class Service:
    """A service that runs jobs.

    Attributes:
        suffix: the suffix of the file.
        start: the command that submits the file; `{}` is its name.
        missing: what the user must still fill in or have.
        takes_image: True if the file names a container image.
        most_nodes: machines of one job; None: any number.
        machines: the kind of machine for each possible number of GPUs; empty: any number of GPUs.
        shares_disk: True if the machines see the folder that the job is submitted from.
    """

    suffix: str
    start: str
    missing: str
    takes_image: bool = True
    most_nodes: int | None = None
    machines: dict[int, str] | None = None
    shares_disk: bool = False


SERVICES = {
    "slurm": Service(
        ".sbatch", "sbatch {}", "partition, time, and the environment of Python", takes_image=False, shares_disk=True
    ),
    "kubernetes": Service(".yaml", "kubectl apply -f {}", "the secret s3-credentials, or other keys of the bucket"),
    "skypilot": Service(".yaml", "sky jobs launch {}", "the packages that the job imports", takes_image=False),
    "ray": Service(".py", "python {}", "the address of the cluster (RAY_ADDRESS)", takes_image=False, shares_disk=True),
    "modal": Service(
        ".py",
        "modal run --detach {}",
        "the packages that the job imports, and the secret s3-credentials",
        takes_image=False,
        most_nodes=1,
        machines={number: "H100" for number in range(1, 9)},
    ),
    "dstack": Service(".yaml", "dstack apply -f {}", "the keys of the bucket in the environment, and the fleet"),
    "sagemaker": Service(
        ".py",
        "python {} --role ARN",
        "the role, and the region in the environment",
        machines={1: "ml.p5.4xlarge", 8: "ml.p5.48xlarge"},
    ),
    "vertex": Service(
        ".yaml",
        "gcloud ai custom-jobs create --region REGION --display-name paceline --config {}",
        "the region",
        machines={number: f"a3-highgpu-{number}g" for number in (1, 2, 4, 8)},
    ),
    "azure_ml": Service(".yaml", "az ml job create --file {}", "the compute target"),
    "hf_jobs": Service(
        ".py",
        "python {}",
        "the keys of the bucket in the environment",
        most_nodes=1,
        machines={1: "h200", 2: "h200x2", 4: "h200x4", 8: "h200x8"},
    ),
}


@dataclass(frozen=True)
class Request:
    """A file to write.

    Attributes:
        service: a key of `SERVICES`.
        target: the configuration or script.
        rest: the options of the job.
        nodes, gpus: machines, and GPUs of each.
        image: the container image; None: a placeholder that the user replaces.
        output: the file; None: a name made of job and service, in the current folder.
        output_dir: the output folder of the job, if it is known.
    """

    service: str
    target: Path
    rest: tuple[str, ...] = ()
    nodes: int = 1
    gpus: int = 8
    image: str | None = None
    output: Path | None = None
    output_dir: str | None = None

    @property
    def name(self) -> str:
        """The name of the job, valid for all services: lower-case letters, digits and dashes."""
        words = re.sub(r"[^a-z0-9]+", "-", self.target.stem.lower()).strip("-")[:40].strip("-")
        return words if words[:1].isalpha() and words not in RESERVED else f"job-{words}".strip("-")

    @property
    def path(self) -> Path:
        """The file to write."""
        return self.output or Path(f"{self.target.stem}_{self.service}{SERVICES[self.service].suffix}")

    @property
    def words(self) -> list[str]:
        """The words after `paceline launch` and its options, or after `python`."""
        target = self.target.as_posix()
        start = ["-m", "paceline", "train", target] if self.target.suffix in JOB_SUFFIXES else [target]
        return [*start, *self.rest]


def run(words: list[str]) -> int:
    """Writes the file, and prints the command that submits it and what is still missing.

    Raises:
        UsageError: an unknown service or option, a value that the service has no place for, or a file that exists.
    """
    request = read_request(words)
    service = SERVICES[request.service]
    text = render(request)
    write_new(request.path, text)
    size = size_of(request)
    say(f"wrote {request.path}: {size[0].lower()}{size[1:]}, {' '.join(map(shlex.quote, request.words))}")
    missing = [service.missing]
    if service.takes_image and request.image is None:
        missing.insert(0, f"the image ({IMAGE} is a placeholder; --image)")
    elif service.takes_image:
        missing.append(f"{request.target.as_posix()} and what it imports, in the image's /workspace")
    say(f"fill in: {'; '.join(missing)}")
    if not service.shares_disk and not (request.output_dir and is_url(request.output_dir)):
        place = "output_dir" if request.output_dir is None else f"output_dir {request.output_dir!r}"
        say(f"{place}: a folder of a machine is lost with it; give --output_dir a URL such as s3://bucket/run")
    if request.target.suffix == ".py" and "--resume_from_checkpoint" not in request.rest:
        say("a restarted script resumes only if it says so: --resume_from_checkpoint auto")
    say(f"next: {service.start.format(shlex.quote(str(request.path)))}")
    return 0


def read_request(words: Sequence[str]) -> Request:
    """Reads the command line.

    The options of this command may stand before the target, or behind a configuration; behind a script, all words are
    the script's.

    Raises:
        UsageError: an unknown service or option, an invalid number, or a target that cannot be read.
    """
    own: dict[str, str] = {}
    target: Path | None = None
    rest: list[str] = []
    pending = list(words)
    while pending:
        word = pending.pop(0)
        name, equals, value = word.partition("=")
        is_script = target is not None and target.suffix == ".py"
        if name in OPTIONS and not is_script:
            if name in own:
                raise UsageError(f"{name} is given twice")
            if not equals and (not pending or pending[0].startswith("--")):
                raise UsageError(f"{name} needs a value")
            own[name] = value if equals else pending.pop(0)
        elif target is not None:
            rest.append(word)
        elif word.startswith("-"):
            raise UsageError(f"launch --on: there is no option {name}{suggest(name, OPTIONS)}")
        else:
            target = Path(word)
    service = own.get("--on", "").replace("-", "_").lower()
    if service not in SERVICES:
        raise UsageError(f"--on {own.get('--on')}: there is no such service{suggest(service, SERVICES)}")
    if target is None:
        raise UsageError(f"launch --on {service} needs a configuration or a script\n\n{LAUNCH}")
    request = Request(
        service,
        target,
        tuple(rest),
        number_of(own, "--nodes", 1),
        number_of(own, "--gpus", 8),
        own.get("--image"),
        Path(own["--output"]) if "--output" in own else None,
        check_target(target, rest),
    )
    check(request)
    return request


def number_of(own: dict[str, str], name: str, default: int) -> int:
    """Returns a count. Raises UsageError if it is no whole number from 1 on."""
    text = own.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) < 1:
        raise UsageError(f"{name} {text}: expected a whole number of 1 or more")
    return int(text)


def check_target(target: Path, rest: list[str]) -> str | None:
    """Checks that the job can be read, and returns its output folder if it is known.

    Raises:
        UsageError: it cannot, is neither a configuration nor a script, or is a job of TensorFlow.
    """
    if target.suffix in JOB_SUFFIXES:
        job, fresh = read_job([str(target), *rest])
        if job.framework != "torch":
            raise UsageError("launch --on starts the processes of torch; TensorFlow is configured by TF_CONFIG")
        if fresh:
            raise UsageError("--fresh would begin anew at every restart: leave it out, or name another output_dir")
        found = job.arguments.get("output_dir")
        return None if found is None else str(found)
    if target.suffix != ".py":
        raise UsageError(f"{target}: expected a configuration ({', '.join(JOB_SUFFIXES)}) or a script (.py)")
    if not target.is_file():
        raise UsageError(f"{target} cannot be read: there is no such script")
    for index, word in enumerate(rest):
        name, equals, value = word.partition("=")
        if name in ("--output_dir", "--output-dir"):
            return value if equals else next(iter(rest[index + 1 :]), None)
    return None


def check(request: Request) -> None:
    """Refuses what a service has no place for, and values that would be unsafe in a file.

    Raises:
        UsageError: the message names the option, its value and the remedy.
    """
    service = SERVICES[request.service]
    if service.most_nodes is not None and request.nodes > service.most_nodes:
        raise UsageError(f"--nodes {request.nodes}: a job of {request.service} has one machine")
    if service.machines is not None and request.gpus not in service.machines:
        known = ", ".join(map(str, service.machines))
        raise UsageError(f"--gpus {request.gpus}: machines of {request.service} with H100 or H200 have {known}")
    if request.image is not None and not service.takes_image:
        raise UsageError(f"--image: the file for {request.service} names no image; leave it out")
    if request.image is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_./:@-]*", request.image):
        raise UsageError(f"--image {request.image!r} is not the name of a container image")
    for word in [*request.words, str(request.path), os.getcwd()]:
        if not word.isprintable():
            raise UsageError(f"{word!r} contains a line break or a control character, which such a file cannot hold")
    masked = mask_command(request.words)
    if masked != request.words:
        raise UsageError(f"{shlex.join(masked)}: a secret has no place in a file; use the environment of the service")
    is_outside = request.target.is_absolute() or ".." in request.target.parts
    if is_outside and not service.shares_disk:
        raise UsageError(
            f"{request.target}: the machines of {request.service} have only what lies below the current folder; "
            "start the command in a folder above it, and name the file from there"
        )


def write_new(path: Path, text: str) -> None:
    """Writes a file that does not exist yet; nothing is left of one that cannot be completed.

    Raises:
        UsageError: it exists, or cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8", newline="\n") as file:
            try:
                file.write(text)
                file.flush()
            except OSError:
                path.unlink()
                raise
    except FileExistsError:
        raise UsageError(f"{path} exists: it is not overwritten; name another file with --output") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error


# ---- the text


def render(request: Request) -> str:
    """Returns the text of the file: the template of the service with its placeholders replaced."""
    template = resources.files("paceline.cli").joinpath("services", f"{request.service}.txt").read_text("utf-8")
    values = values_of(request)

    def replace(match: re.Match[str]) -> str:
        indent, alone, inside = match.groups()
        value = values[alone or inside]
        if inside is not None:
            return value
        lines = value.split("\n")
        return "\n".join(indent + line for line in lines)

    text = PLACEHOLDER.sub(replace, template)
    return "\n".join(line.rstrip() for line in text.split("\n") if line.strip() or line == "")


def values_of(request: Request) -> dict[str, str]:
    """Returns the text of each placeholder, quoted for its place."""
    service = SERVICES[request.service]
    words = request.words
    folder = os.path.relpath(Path.cwd(), request.path.absolute().parent).replace(os.sep, "/")
    makers: dict[str, Callable[[], str]] = {
        "command": lambda: " \\\n".join(shell_lines(words)),
        "folded": lambda: "\n".join(shell_lines(words)),
        "words": lambda: "\n".join(map(kubernetes_word, words)),
        "list": lambda: "\n".join(f"{python_text(word)}," for word in words),
        "folder": lambda: python_text(str(Path.cwd())) if request.service == "ray" else yaml_word(folder),
        "workers": lambda: str(request.nodes * request.gpus) if request.service == "ray" else vertex_pool(request),
    }
    machine = "" if service.machines is None else service.machines[request.gpus]
    bucket = request.output_dir if str(request.output_dir).startswith("s3://") else "s3://bucket/team"
    simple = {
        "name": request.name,
        "nodes": str(request.nodes),
        "gpus": str(request.gpus),
        "image": yaml_word(request.image or IMAGE) if service.suffix == ".yaml" else request.image or IMAGE,
        "size": size_of(request),
        "file": shown_path(request.path),
        "machine": machine,
        "flavor": machine,
        "packages": packages_of(request),
        "bucket": python_text(str(bucket)),
    }
    return {**simple, **{name: make() for name, make in makers.items()}}


def size_of(request: Request) -> str:
    """Returns the size of a job as the beginning of a sentence."""
    machines = "One machine" if request.nodes == 1 else f"{request.nodes} machines"
    return f"{machines} with {request.gpus} GPU{'s' * (request.gpus > 1)}{' each' * (request.nodes > 1)}"


def shown_path(path: Path) -> str:
    """Returns a path for a comment; a name that could end the comment is left out."""
    text = path.as_posix()
    return text if re.fullmatch(r"[\w./+@-]+", text) else "FILE"


def packages_of(request: Request) -> str:
    """Returns the requirement of the package, with the extras that a configuration or an object store needs."""
    extras = ["torch"]
    if request.target.suffix in JOB_SUFFIXES:
        extras += ["transformers", "datasets"]
    scheme = str(request.output_dir).partition("://")[0]
    return f"paceline[{','.join([*extras, EXTRAS.get(scheme, 's3')])}]"


def shell_lines(words: Sequence[str]) -> list[str]:
    """Returns the words of a command, quoted for bash: a line for the target, and one for each option with its values.

    Services replace `$(...)` and `${{...}}` in commands before the shell sees them, also in quotes: the two characters
    are separated.
    """
    lines: list[str] = []
    for word in words:
        quoted = re.sub(r"\$(?=[({])", "$''", shlex.quote(word))
        if not lines or word.startswith("--"):
            lines.append(quoted)
        else:
            lines[-1] += f" {quoted}"
    return lines


def yaml_word(word: str) -> str:
    """Returns a text as a YAML scalar: plain if that is safe, else in double quotes."""
    if PLAIN.fullmatch(word) and word.lower() not in RESERVED and yaml.safe_load(word) == word:
        return word
    return json.dumps(word, ensure_ascii=False)


def kubernetes_word(word: str) -> str:
    """Returns a word of a container's command as YAML. Kubernetes replaces `$(NAME)`; `$$` stands for `$`."""
    return yaml_word(word.replace("$", "$$"))


def python_text(text: str) -> str:
    """Returns a Python literal in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def vertex_pool(request: Request) -> str:
    """Returns the second worker pool of Vertex AI: all machines but the first."""
    if request.nodes == 1:
        return ""
    return f"- replicaCount: {request.nodes - 1}\n  machineSpec: *machine\n  containerSpec: *container"
