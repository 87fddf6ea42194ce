"""Mutation testing: change one operator, number or condition at a time and see that a test of the default suite fails.

    pip install -e ".[dev,mutation]"
    python tools/mutation.py                              # sample, find each mutant's tests, run them: an hour or two
    python tools/mutation.py --group loop --tests tests/core tests/trainer
    python tools/mutation.py --again --whole --seconds 600    # the survivors, with all of the files that reach them
    python tools/mutation.py --check                      # the tests that killed, on the tree as it is
    python tools/mutation.py --table                      # verdicts by group, and the survivors

The mutants are a seeded sample of what cosmic-ray's operators make of the files of GROUPS. Which tests reach one is
found by one run of each test file on a copy of the tree in which the statements of the sample report that they run;
coverage.py would leave out the programs and ranks that tests start. A mutant's tests run in a process forked from one
that has imported torch and transformers, on a second copy of the tree, the cheapest file first, until one fails.

Results are lines of JSON in build/mutation. What they hold is not run again, so an interrupted run goes on; a test file
that changed is run again for what it reaches.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import MutationVisitor
from cosmic_ray.operators.provider import OperatorProvider

ROOT = Path(__file__).resolve().parent.parent
GROUPS = {
    "loop": ("core/loop.py", "core/nonfinite.py"),
    "engine": ("pytorch/engine.py", "pytorch/sync.py", "pytorch/distributed/window.py"),
    "loss rule": (
        *("pytorch/model/loss.py", "pytorch/model/reductions.py"),
        *("pytorch/loss_probe.py", "pytorch/loss_audit.py"),
    ),
    "feed and sampling": (
        *("pytorch/data/feed.py", "pytorch/data/sampling.py", "pytorch/data/data_shard.py"),
        *("pytorch/data/shuffle.py", "pytorch/data/samplers.py", "pytorch/data/batches.py"),
    ),
    "checkpoint store": (
        *("checkpoint/folders.py", "checkpoint/manifest.py", "checkpoint/retention.py"),
        *("pytorch/checkpoint/background.py", "pytorch/checkpoint/saves.py", "pytorch/checkpoint/checkpointer.py"),
    ),
    "evaluation": (
        *("pytorch/evaluation/predictor.py", "pytorch/evaluation/loss_sum.py", "pytorch/evaluation/distributed.py"),
        *("pytorch/evaluation/batch_predictor.py", "pytorch/evaluation/prediction_buffer.py"),
        *("core/rows.py", "core/streaming.py"),
    ),
    "tf engine": ("tensorflow/engine.py", "tensorflow/compiled.py", "tensorflow/evaluation.py"),
}
# Read the source as text: they would fail for the change, not for what it does.
NOT_RUN = ("tests/test_architecture.py", "tests/test_docs.py")
# Are put for each other only: "is" for "==" differs for equal objects alone, and Python warns of it beside a literal.
IDENTITY = {"Is", "IsNot"}
PRELOADED = ("torch", "torch._dynamo", "torch.distributed.fsdp", "transformers.trainer_seq2seq", "datasets")
START_OF_PROGRAMS = 8.0  # seconds that a file's first program costs: tests/support/warm.py imports the libraries
MEMORY = 12 * 2**30  # bytes that a mutant's process may take
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
PROBE = """import os
SEEN = set()
def reached(place):
    test = os.environ.get("PYTEST_CURRENT_TEST")
    if test and (test, place) not in SEEN:
        SEEN.add((test, place))
        file = os.open({path!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, (place + "\\t" + test + "\\n").encode())
        os.close(file)
"""


@dataclass(frozen=True)
class Mutant:
    """One change: `line` of `file` (of src/paceline) reads `after`, not `before`. `place` is the statement or function.

    Made by occurrence number `occurrence` of cosmic-ray's `operator`.
    """

    group: str
    file: str
    line: int
    operator: str
    occurrence: int
    before: str
    after: str
    place: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.after}"


# ---- the sample


def sample(group: str, number: int, seed: int) -> list[Mutant]:
    """Mutants of a group: first the places are drawn, then one operator of each. What does not compile is left out."""
    sites: dict[tuple[str, Any, str], list[tuple[str, int]]] = defaultdict(list)
    for file in GROUPS[group]:
        source = source_of(file)
        left_out = list(ranges_left_out(ast.parse(source)))
        for operator, occurrence, start, end in positions(source):
            if not any(first <= start and end <= last for first, last in left_out):
                sites[file, start, operator.split("_")[0]].append((operator, occurrence))
    draw = random.Random(f"{group} {seed}")
    mutants: list[Mutant] = []
    for file, start, family in draw.sample(sorted(sites), len(sites)):
        mutant = make(group, file, start[0], *draw.choice(sites[file, start, family]))
        if mutant is not None:
            mutants.append(mutant)
        if len(mutants) == number:
            break
    return sorted(mutants, key=lambda mutant: (GROUPS[group].index(mutant.file), mutant.line))


def source_of(file: str) -> str:
    return (ROOT / "src" / "paceline" / file).read_text(encoding="utf-8")


def operators() -> dict[str, Any]:
    """The operators that need no arguments, by name."""
    provider = OperatorProvider()
    return {
        name: provider[name]
        for name in provider
        if not provider[name].arguments() and len(IDENTITY & set(name.split("_"))) != 1
    }


def positions(source: str) -> Iterator[tuple[str, int, Any, Any]]:
    """(operator, occurrence, start, end) of each mutant of a file; places are (line, column)."""
    nodes = list(ast_nodes(get_ast(source)))
    for name, operator in operators().items():
        found = (place for node in nodes for place in operator().mutation_positions(node))
        yield from ((name, occurrence, start, end) for occurrence, (start, end) in enumerate(found))


def ranges_left_out(tree: ast.Module) -> Iterator[tuple[Any, Any]]:
    """Returns the ranges that no test can observe: annotations, log messages, blocks for the type checker."""
    for node in ast.walk(tree):
        found: list[ast.AST | None] = []
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, FUNCTIONS):
            found = [node.returns]
        elif isinstance(node, ast.arg | ast.AnnAssign):
            found = [node.annotation]
        elif called.split(".")[0] in ("logger", "warnings"):
            found = [node]
        elif isinstance(node, ast.Call) and called in ("isinstance", "cast"):
            found = [node.args[1 if called == "isinstance" else 0]]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            found = [node]
        elif isinstance(node, ast.Module):
            found = [each.value for each in node.body if isinstance(each, ast.Assign) and "|" in ast.unparse(each)]
        for each in filter(None, found):
            place: Any = each
            yield (place.lineno, place.col_offset), (place.end_lineno, place.end_col_offset)


def make(group: str, file: str, line: int, operator: str, occurrence: int) -> Mutant | None:
    """The mutant, with what it changes; None if it changes nothing that compiles."""
    before, after = source_of(file), mutated(file, operator, occurrence)
    try:
        if after is None or ast.dump(ast.parse(after)) == ast.dump(ast.parse(before)):
            return None
        compile(after, file, "exec")
    except SyntaxError:
        return None
    old, new = before.splitlines(), after.splitlines()
    place = place_of(file, ast.parse(before), line)
    changed = "" if len(new) < len(old) or operator == "RemoveDecorator" else new[line - 1].strip()
    return Mutant(group, file, line, operator, occurrence, old[line - 1].strip(), changed, place)


def mutated(file: str, operator: str, occurrence: int) -> str | None:
    """The source of a file with one change."""
    code: str | None = MutationVisitor.mutate_code(source_of(file), operators()[operator](), occurrence)
    return code


# ---- which tests reach which statement


def place_of(file: str, tree: ast.Module, line: int) -> str:
    """The statement that holds a line, or its function where the line is of the header; the file outside functions."""
    inside = {id(node) for function in ast.walk(tree) if isinstance(function, FUNCTIONS) for node in ast.walk(function)}
    found: Any = None
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and id(node) in inside and span(node)[0] <= line <= span(node)[1]:
            found = node if found is None or span(node)[0] >= span(found)[0] else found
    return file if found is None else f"{file}:{found.lineno}"


def span(node: Any) -> tuple[int, int]:
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))]), node.end_lineno


def with_probes(file: str, places: set[str]) -> str:
    """The source of a file in which functions, and the statements of `places`, report that they are run."""
    tree = ast.parse(source_of(file))
    for node in list(ast.walk(tree)):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and not isinstance(node, ast.Module | ast.ClassDef):
                for each in [each for each in block if f"{file}:{each.lineno}" in places]:
                    block.insert(block.index(each), probe(f"{file}:{each.lineno}"))
        if isinstance(node, FUNCTIONS):
            node.body.insert(int(ast.get_docstring(node) is not None), probe(f"{file}:{node.lineno}"))
    return ast.unparse(ast.fix_missing_locations(tree))


def probe(place: str) -> ast.stmt:
    return ast.parse(f"__import__('paceline_probe').reached({place!r})").body[0]


def find_tests(mutants: Sequence[Mutant], files: Sequence[str], store: Path) -> None:
    """Run each test file once; what each of its tests reaches, takes and gives is kept."""
    places = {mutant.place for mutant in mutants}
    modules = {file for group in GROUPS.values() for file in group}
    sources = "".join(source_of(file) for file in sorted(modules))
    known = {row["file"]: row["sum"] for row in read(store / "tests.jsonl") if places <= set(row["places"])}
    with tempfile.TemporaryDirectory(prefix="paceline-probes-") as folder:
        tree, marks = copy_tree(Path(folder)), Path(folder, "marks")
        (tree / "src" / "paceline_probe.py").write_text(PROBE.format(path=str(marks)))
        for file in modules:
            (tree / "src" / "paceline" / file).write_text(with_probes(file, places), encoding="utf-8")
        for number, file in enumerate(files, 1):
            digest = hashlib.sha256((sources + (ROOT / file).read_text(encoding="utf-8")).encode()).hexdigest()
            if known.get(file) == digest:
                continue
            marks.write_text("")
            started = time.monotonic()
            status, reports = run_tests(tree, {file: None}, {}, 1200)
            if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
                raise RuntimeError(f"{file} ended with {status}:\n{(tree.parent / 'output').read_text()[-2000:]}")
            reached = {tuple(line.split("\t")) for line in marks.read_text().splitlines()}
            row = {"file": file, "sum": digest, "places": sorted(places), "tests": reports, "reached": sorted(reached)}
            append(store / "tests.jsonl", row)
            seconds = time.monotonic() - started
            print(f"{number} of {len(files)}: {file}: {len(reports)} tests, {seconds:.0f} s", flush=True)


class Reach:
    """Observations from runs of the test files.

    Attributes:
        seconds: of each test that passed.
        files: those of a file.
        tests: those that reach a place.
    """

    def __init__(self, store: Path) -> None:
        latest = {row["file"]: row for row in read(store / "tests.jsonl")}
        self.seconds: dict[str, float] = {}
        self.files: dict[str, list[str]] = {}
        self.tests: dict[str, set[str]] = defaultdict(set)
        for file, row in latest.items():
            passed = {name: each["seconds"] for name, each in row["tests"].items() if each["outcome"] == "passed"}
            self.seconds.update(passed)
            self.files[file] = list(passed)
            for place, text in row["reached"]:
                test, _, phase = text.rpartition(" ")
                # what a fixture reaches may be shared by all tests of its file
                tests = set(passed) if phase == "(setup)" else {test} & set(passed)
                self.tests[place] |= tests
                self.tests[place.split(":")[0]] |= tests

    def choose(self, mutant: Mutant, seconds: float, is_whole: bool) -> dict[str, set[str]]:
        """Tests of a mutant by file, the cheapest file first, for so many seconds of tests in all."""
        by_file: dict[str, set[str]] = defaultdict(set)
        for test in self.tests[mutant.place]:
            file = test.split("::")[0]
            by_file[file] |= set(self.files[file]) if is_whole else {test}
        costs = {file: sum(self.seconds[test] for test in tests) for file, tests in by_file.items()}
        for file in costs:
            if any(word in (ROOT / file).read_text(encoding="utf-8") for word in ("import warm", "import processes")):
                costs[file] += START_OF_PROGRAMS
        chosen: dict[str, set[str]] = {}
        for file in sorted(costs, key=costs.__getitem__):
            if chosen and seconds < costs[file]:
                break
            for test in sorted(by_file[file], key=self.seconds.__getitem__):
                if seconds > 0:
                    chosen.setdefault(file, set()).add(test)
                seconds -= self.seconds[test]
        return chosen


# ---- running tests


def run_tests(
    tree: Path, tests: Mapping[str, set[str] | None], limits: Mapping[str, float], limit: float, stops: bool = False
) -> tuple[int, dict[str, Any]]:
    """Run tests of a tree, or all of a file (None), in a forked process.

    Args:
        limits: seconds of each test.
        limit: seconds of all.
        stops: the first that fails is the last.

    Returns:
        pytest's status, or the negative number of the signal that ended it; and outcome and seconds of each test.
    """
    reports = tree.parent / "reports"
    reports.write_text("")
    pid = os.fork()
    if pid == 0:
        status = 3
        try:
            become_pytest(tree)
            words = [*tests, *(["-x"] if stops else []), "-m", "not slow and not xla", "-p", "no:cacheprovider"]
            words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins that the libraries have imported
            status = int(pytest.main(words, plugins=[Watch(tests, limits, reports)]))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    end, done, status = time.monotonic() + limit, 0, 0
    try:
        while not done and time.monotonic() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            time.sleep(0.02)
    finally:
        try:
            os.killpg(pid, signal.SIGKILL)  # what it started too
        except ProcessLookupError:
            pass
        if not done:
            status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status), {row.pop("test"): row for row in read(reports)}


def become_pytest(tree: Path) -> None:
    """Give this process what a run of the tree's tests finds in one of its own; its output goes to a file."""
    os.setsid()
    output = os.open(tree.parent / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(output, number)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    os.chdir(tree)
    sys.path.insert(0, str(tree / "src"))
    os.environ["PYTHONPATH"] = str(tree / "src")


class Watch:
    """A pytest plugin: keeps the chosen tests, in the order of their files, and writes down how each went."""

    def __init__(self, tests: Mapping[str, set[str] | None], limits: Mapping[str, float], path: Path) -> None:
        self.tests, self.limits, self.path = tests, limits, path
        self.files = list(tests)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self.has(item.nodeid)]
        items.sort(key=lambda item: self.files.index(item.nodeid.split("::")[0]))
        for item in items:
            if item.nodeid in self.limits:
                item.add_marker(pytest.mark.timeout(self.limits[item.nodeid]))

    def has(self, test: str) -> bool:
        chosen = self.tests[test.split("::")[0]]
        return chosen is None or test in chosen

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            append(self.path, {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)})


def run_mutants(mutants: Sequence[Mutant], store: Path, seconds: float, is_whole: bool) -> None:
    """Run the tests of each of these mutants, or of the whole files that have such a test."""
    reach = Reach(store)
    with tempfile.TemporaryDirectory(prefix="paceline-mutants-") as folder:
        tree = copy_tree(Path(folder))
        for number, mutant in enumerate(mutants, 1):
            started = time.monotonic()
            tests = reach.choose(mutant, seconds, is_whole)
            limits = {test: 20 + 10 * reach.seconds[test] for chosen in tests.values() for test in chosen}
            put(tree, mutant.file, mutated(mutant.file, mutant.operator, mutant.occurrence) or "", number)
            total = 60 + 10 * sum(reach.seconds[test] for test in limits)
            status, reports = run_tests(tree, tests, limits, total, stops=True) if tests else (0, {})
            put(tree, mutant.file, source_of(mutant.file), number)
            by = killed_by(status, reports)
            row = {**asdict(mutant), "name": mutant.name, "verdict": "killed" if by else "survived", "by": by}
            row.update(tests=len(limits), status=status, seconds=round(time.monotonic() - started, 1))
            append(store / "results.jsonl", row)
            print(f"{number} of {len(mutants)}: {mutant.name}: {row['verdict']} {by} {row['seconds']} s", flush=True)


def killed_by(status: int, reports: Mapping[str, Any]) -> str:
    """The test that failed, or what else ended the run; empty if the mutant survived.

    An error inside pytest tells nothing: the mutant counts as one that survived.
    """
    failed = [test for test, report in reports.items() if report["outcome"] == "failed"]
    if status in (pytest.ExitCode.OK, pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
        return ""
    if status < 0:
        return "the time" if status == -signal.SIGKILL else f"signal {-status}"
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:
        return ""
    return failed[0] if failed else "an error of collection"


def check_killers(store: Path) -> list[str]:
    """Run the tests that killed on the tree as it is. Mutants whose test does not pass there lose their verdict."""
    rows = {row["name"]: row for row in read(store / "results.jsonl")}
    tests: dict[str, set[str]] = defaultdict(set)
    for row in rows.values():
        if "::" in row["by"]:
            tests[row["by"].split("::")[0]].add(row["by"])
    with tempfile.TemporaryDirectory(prefix="paceline-plain-") as folder:
        _, reports = run_tests(copy_tree(Path(folder)), tests, {}, 3600)
    passed = {test for test, report in reports.items() if report["outcome"] == "passed"}
    wrong = [row for row in rows.values() if "::" in row["by"] and row["by"] not in passed]
    for row in wrong:
        append(store / "results.jsonl", {**row, "verdict": None})
    return [f"{row['name']}: {row['by']}" for row in wrong]


def put(tree: Path, file: str, source: str, number: int) -> None:
    """Write a module; its time differs from those before, so that no compiled file of another is taken for it."""
    path = tree / "src" / "paceline" / file
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()
    path.write_text(source, encoding="utf-8")
    os.utime(path, (10**9 + number, 10**9 + number))


def copy_tree(folder: Path) -> Path:
    """A copy of the working tree."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, folder / "tree" / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
            target.chmod(source.stat().st_mode)
    return folder / "tree"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, row: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def table(mutants: Sequence[Mutant], store: Path) -> str:
    """Verdicts by group, and the survivors."""
    results = {row["name"]: row for row in read(store / "results.jsonl")}
    lines = ["| group | mutants | killed | survived |", "|---|---|---|---|"]
    for group in [*GROUPS, "all"]:
        names = [each.name for each in mutants if group in (each.group, "all")]
        verdicts = [results[name]["verdict"] for name in names if name in results]
        killed = verdicts.count("killed")
        share = f" ({killed / len(verdicts):.0%})" if verdicts else ""
        lines.append(f"| {group} | {len(verdicts)} | {killed}{share} | {len(verdicts) - killed} |")
    lines.append("")
    for each in mutants:
        if results.get(each.name, {}).get("verdict") == "survived":
            lines.append(f"- `{each.file}:{each.line}`: `{each.before}` -> `{each.after}`")
    return "\n".join(lines)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", nargs="*", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--each", type=int, default=30, help="mutants of a group (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="*", default=["tests"], help="files and folders to take tests from")
    parser.add_argument("--seconds", type=float, default=90, help="of a mutant's tests (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="run those that survived")
    parser.add_argument("--whole", action="store_true", help="run whole files, not only the tests that reach a mutant")
    parser.add_argument("--check", action="store_true", help="run the tests that killed on the tree as it is")
    parser.add_argument("--list", action="store_true", help="print the sample and run nothing")
    parser.add_argument("--table", action="store_true", help="print the tables and run nothing")
    parser.add_argument("--store", type=Path, default=ROOT / "build" / "mutation")
    options = parser.parse_args()
    store: Path = options.store
    store.mkdir(parents=True, exist_ok=True)
    every = [mutant for group in GROUPS for mutant in sample(group, options.each, options.seed)]
    mutants = [mutant for mutant in every if mutant.group in options.group]
    if options.table or options.list:
        listed = "\n".join(f"{each.name}  was  {each.before}" for each in mutants)
        print(table(mutants, store) if options.table else listed)
        return 0
    preload(store)
    if options.check:
        wrong = check_killers(store)
        print("\n".join(wrong))
        return int(bool(wrong))
    find_tests(every, test_files(options.tests), store)
    verdicts = {row["name"]: row["verdict"] for row in read(store / "results.jsonl")}
    mutants = [each for each in mutants if verdicts.get(each.name) == ("survived" if options.again else None)]
    run_mutants(mutants, store, options.seconds, options.whole)
    return 0


def preload(store: Path) -> None:
    """Import the large libraries, with the environment that tests/conftest.py gives them."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    os.environ.update(HF_HOME=str(store / "cache"), TORCH_EXTENSIONS_DIR=str(store / "torch_extensions"))
    for name in PRELOADED:
        importlib.import_module(name)


def test_files(words: Sequence[str]) -> list[str]:
    """The test files that are given, and those of folders that are."""
    given = [ROOT / word for word in words]
    paths = {path for each in given for path in (each.rglob("test_*.py") if each.is_dir() else [each])}
    files = [path.relative_to(ROOT).as_posix() for path in sorted(paths)]
    return [file for file in files if file not in NOT_RUN]


if __name__ == "__main__":
    sys.exit(main())
