"""The commit that a result was measured at, its age, and changes to the measured code since."""

from __future__ import annotations

import ast
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

_LOOP = ("core/loop.py", "core/events.py", "core/state.py", "core/schedules.py")
# A plain step imports none of the packages of methods beside these: members, pruning, distillation ...
_STEP = (*_LOOP, "pytorch/*.py", ":!pytorch/seq2seq.py", ":!pytorch/model_card.py", "pytorch/model", "pytorch/optim")
_STEP += ("pytorch/data", ":!pytorch/data/coll*", "pytorch/step_parts/registry.py", "pytorch/probes")
_STEP += (":!pytorch/data/generators.py",)  # of workers, and of replayed epochs
_STEP += ("pytorch/distributed/precision.py", "pytorch/distributed/strategy.py", "pytorch/distributed/window.py")
_PLAIN_STEP = (
    *_STEP,
    ":!pytorch/model/linear_*.py",
    ":!pytorch/model/lazy_*.py",
)  # of a model without the head of a language model
_TF_STEP = ("tensorflow", *_LOOP)
_SAVE = ("checkpoint", "pytorch/checkpoint")

# benchmark -> the code in src/paceline that its numbers depend on, beside the benchmark itself; globs of git
COVERS: dict[str, tuple[str, ...]] = {
    "step_overhead": (*_PLAIN_STEP, *_SAVE),
    "import_time": ("**/*.py", ":!cli", ":!tensorflow", ":!drop_in.py"),
    "run_growth": (*_PLAIN_STEP, *_SAVE, "core/log_text.py", "core/lengths.py"),
    "report_page": ("report", ":!report/live.js", ":!report/serve.py", ":!report/status.py", "core/journal.py"),
    "gpt2_124m": _STEP,
    "eval_memory": ("core/metrics.py", "core/streaming.py", "pytorch/evaluation"),
    "checkpoint_save": _SAVE,
    "sharded_save": (*_SAVE, "pytorch/distributed/fsdp.py"),
    "export": ("pytorch/checkpoint", "checkpoint/manifest.py", "cli/export.py"),
    "resume_time": (*_SAVE, "pytorch/session.py", "pytorch/data", ":!pytorch/data/coll*"),
    "collation": ("pytorch/data/coll*", "pytorch/data/padding.py"),
    "data_loading": ("pytorch/data", "pytorch/loaders.py", "core/lengths.py"),
    "ledger": (*_PLAIN_STEP, "core/ledger.py"),
    "large_vocabulary": (
        "pytorch/model",
        "pytorch/probes",
        "pytorch/engine.py",
        "pytorch/step_parts/linear_loss_run.py",
    ),
    "ragged_text": (*_STEP, "pytorch/data/packing.py"),
    "memory_options": _STEP,
    "compile_ragged": ("pytorch/model", "pytorch/engine.py", "pytorch/probes"),
    "members": (*_PLAIN_STEP, "pytorch/members"),
    "shared_overhead": (*_PLAIN_STEP, "pytorch/distributed"),
    "tf_step": _TF_STEP,
    "tf_step_small": _TF_STEP,
    "tf_step_transformer": _TF_STEP,
}
SCRIPTS = {"tf_step_small": "tf_step", "tf_step_transformer": "tf_step"}  # of benchmarks that share one


@dataclass(frozen=True)
class Age:
    """The age of a result.

    Attributes:
        commits: number of commits since; None if this clone does not have the commit.
        is_stale: the measured code has changed since (also if uncommitted; comments and docstrings do not count), or
            differed from the commit when it was measured; None if unknown.
    """

    commits: int | None
    is_stale: bool | None


def git(*arguments: str, root: Path = ROOT) -> subprocess.CompletedProcess[str] | None:
    """Returns what git answered; None where there is no git."""
    try:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    except OSError:
        return None


def covered_paths(benchmark: str) -> list[str]:
    """Patterns of git, from the root of the repository."""
    paths = []
    for path in COVERS[benchmark]:
        magic = "exclude,glob" if path.startswith(":!") else "glob"
        paths.append(f":({magic})src/paceline/{path.removeprefix(':!')}")
    return [f"benchmarks/{SCRIPTS.get(benchmark, benchmark)}.py", *paths]


def find_commit(root: Path = ROOT) -> dict[str, Any]:
    """The commit of the working tree and whether its code is as committed; results, which benchmarks write, apart."""
    head = git("rev-parse", "HEAD", root=root)
    if head is None or head.returncode != 0:
        return {"commit": None, "is_clean": None}
    changed = git("status", "--porcelain", "--", "src", "benchmarks/*.py", root=root)
    return {"commit": head.stdout.strip(), "is_clean": changed is not None and not changed.stdout.strip()}


def code_of(source: str) -> str:
    """Returns the code of a Python file without comments, docstrings and layout.

    Raises:
        SyntaxError: the source cannot be parsed.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            has_docstring = ast.get_docstring(node, clean=False) is not None
            node.body = node.body[has_docstring:]
    return ast.dump(tree)


def has_changed(name: str, commit: str, root: Path) -> bool:
    """True if the code of a file, one that git calls changed, differs from that of a commit."""
    before, path = git("show", f"{commit}:{name}", root=root), root / name
    if before is None or before.returncode != 0 or not path.is_file() or path.suffix != ".py":
        return True
    try:
        return code_of(before.stdout) != code_of(path.read_text(encoding="utf-8"))
    except SyntaxError:
        return True


def find_age(result: dict[str, Any], root: Path = ROOT) -> Age:
    """Returns the age of a result by the history of this clone."""
    commit = result.get("commit")
    known = git("cat-file", "-e", f"{commit}^{{commit}}", root=root) if commit else None
    if known is None or known.returncode != 0:
        return Age(None, None)
    count = git("rev-list", "--count", f"{commit}..HEAD", root=root)
    difference = git("diff", "--name-only", commit, "--", *covered_paths(result["benchmark"]), root=root)
    if count is None or difference is None or difference.returncode != 0:
        return Age(None, None)
    is_changed = any(has_changed(name, str(commit), root) for name in difference.stdout.splitlines())
    return Age(int(count.stdout), is_changed or not result.get("is_clean"))


def describe(result: dict[str, Any], age: Age) -> str:
    """`of abc1234, 12 commits ago`, in plain words where that is not known."""
    if not result.get("commit"):
        return "of an unknown commit"
    name = f"of {result['commit'][:7]}" + ("" if result.get("is_clean") else " with changes that are not in it")
    if age.commits is None:
        return f"{name}, how long ago cannot be told (its history is not in this clone)"
    return f"{name}, {age.commits} commit{'' if age.commits == 1 else 's'} ago"


def describe_limit(is_met: bool, age: Age) -> str:
    """Describes the outcome of a limit, and marks it if the code has changed since."""
    kept = "yes" if is_met else "**no**"
    if age.is_stale is None:
        return f"{kept} (of today's code: not known)"
    return f"to be measured again (was: {kept})" if age.is_stale else kept


def without_history(page: str) -> str:
    """A page without what depends on the history of the clone: how old the results are and which became stale."""
    page = re.sub(r", (\d+ commits? ago|how long ago cannot be told \(.*?\)):", ":", page)
    page = re.sub(r"to be measured again \(was: (.*?)\)", r"\1", page)
    return page.replace(" (of today's code: not known)", "")
