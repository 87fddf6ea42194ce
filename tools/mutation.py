"""Mutation testing: change one operator, number or condition at a time and see that a test of the default suite fails.

    pip install -e ".[dev,mutation]"
    python tools/mutation.py                              # sample, find each mutant's tests, run them
    python tools/mutation.py --group loop --tests tests/core tests/pytorch/trainer    # those that such tests reach
    python tools/mutation.py --again --whole --seconds 600    # the survivors, with all of the files that reach them
    python tools/mutation.py --check                      # the tests that killed, on the tree as it is
    python tools/mutation.py --table                      # verdicts by group, and the survivors

The mutants are a seeded sample of what cosmic-ray's operators make of the files of GROUPS. One process imports and
collects the tests of a copy of the tree. Which tests reach a mutant is found by one run of each test file, in a fork of
that process in which the statements of the sample report that they run; coverage.py would leave out the programs and
ranks that tests start. For each mutant a fork gets its functions changed in place and runs its tests, the likeliest to
kill it first, until one fails. What a mutant changes outside of functions needs an import and a collection of its own.

Seconds are of the processor: the verdicts do not depend on what else the machine does.

Results are lines of JSON in build/mutation. What they hold is not run again, so an interrupted run goes on; a test file
that changed is run again for what it reaches.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import hashlib
import importlib
import inspect
import itertools
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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
        *("pytorch/probes/loss.py", "pytorch/probes/audit.py"),
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
# By folder of tests: imported by what tests call, so that each fork would; and what a collection would import again.
PRELOADED = {"tests/pytorch": ("torch", "torch._dynamo"), "tests/tensorflow": ("tensorflow", "keras")}
MOMENTS = itertools.count(10**9)  # times of changed files
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


def kept_sample(store: Path, group: str, number: int, seed: int) -> list[Mutant]:
    """The sample, from the store if it was drawn from these sources before: half a minute."""
    key = hashlib.sha256("".join([*map(source_of, GROUPS[group]), f"{number} {seed}"]).encode()).hexdigest()
    for row in read(store / "samples.jsonl"):
        if row["sum"] == key:
            return [Mutant(**each) for each in row["mutants"]]
    mutants = sample(group, number, seed)
    append(store / "samples.jsonl", {"sum": key, "mutants": [asdict(each) for each in mutants]})
    return mutants


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


@functools.cache
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


def find_tests(bench: Bench, mutants: Sequence[Mutant]) -> None:
    """Run each test file once with probes in the modules; what its tests reach, take and give is kept."""
    places = {mutant.place for mutant in mutants}
    modules = sorted({file for group in GROUPS.values() for file in group})
    sources = "".join(source_of(file) for file in modules)
    probed = {file: with_probes(file, places) for file in modules}
    known = {row["file"]: row["sum"] for row in read(bench.store / "tests.jsonl") if places <= set(row["places"])}
    marks = bench.folder / "marks"
    (bench.tree / "src" / "paceline_probe.py").write_text(PROBE.format(path=str(marks)))
    for number, (file, items) in enumerate(bench.items.items(), 1):
        digest = hashlib.sha256((sources + (ROOT / file).read_text(encoding="utf-8")).encode()).hexdigest()
        if known.get(file) == digest:
            continue
        marks.write_text("")
        _, reports = bench.run(items, probed, 1200)
        reached = {tuple(line.split("\t")) for line in marks.read_text().splitlines()}
        row = {"file": file, "sum": digest, "places": sorted(places), "tests": reports, "reached": sorted(reached)}
        append(bench.store / "tests.jsonl", row)
        seconds = sum(report["seconds"] for report in reports.values())
        bench.say(f"{number} of {len(bench.items)}: {file}: {len(reports)} tests, {seconds:.0f} s")


class Reach:
    """Observations from runs of the test files.

    Attributes:
        seconds: of the processor, of each test that passed.
        files: those of a file.
        tests: those that reach a place.
    """

    def __init__(self, store: Path) -> None:
        latest = {row["file"]: row for row in read(store / "tests.jsonl")}
        self.seconds: dict[str, float] = {}
        self.files: dict[str, list[str]] = {}
        self.tests: dict[str, set[str]] = defaultdict(set)
        self.num_places: Counter[str] = Counter()
        self.killers = {row["by"] for row in read(store / "results.jsonl")}
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
                self.num_places.update(tests)

    def choose(self, mutant: Mutant, seconds: float, is_whole: bool, files: Sequence[str]) -> list[str]:
        """Tests of a mutant in some files, the likeliest to kill it for their time first, for so many seconds in all.

        Those that killed another mutant come first, then those that reach few places in little time; of the cases of
        one test, one comes before the second of any.
        """
        reaching = self.tests[mutant.place]
        if mutant.place == mutant.file and not reaching:  # a file without functions reports nothing
            reaching = set().union(*(self.tests[file] for file in GROUPS[mutant.group]))
        tests = {test for test in reaching if test.split("::")[0] in files}
        if is_whole:
            tests = {each for file in {test.split("::")[0] for test in tests} for each in self.files[file]}
        ranked = sorted(tests, key=lambda test: (self.seconds[test] + 0.02) * self.num_places[test])
        seen: Counter[str] = Counter()
        turns: dict[str, tuple[bool, int]] = {}
        for test in ranked:
            function = test.split("[")[0]
            turns[test] = (test not in self.killers, seen[function])
            seen[function] += 1
        chosen: list[str] = []
        for test in sorted(ranked, key=turns.__getitem__):
            if seconds >= self.seconds[test]:
                chosen.append(test)
                seconds -= self.seconds[test]
        return chosen or sorted(ranked, key=self.seconds.__getitem__)[:1]


# ---- running tests


class Bench:
    """A pytest plugin: imports and collects the tests of a copy of the tree once, then calls `work`, which runs some.

    Args:
        work: called with this object in place of pytest's loop over the tests.

    Attributes:
        items: collected tests by file.
        functions: those of imported modules by path.
    """

    def __init__(self, tree: Path, store: Path, output: int, work: Callable[[Bench], None]) -> None:
        self.tree = tree
        self.folder = tree.parent
        self.store = store
        self.output = output
        self.work = work
        self.items: dict[str, list[pytest.Item]] = defaultdict(list)
        self.functions: dict[str, list[types.FunctionType]] = defaultdict(list)
        self.used = 0.0

    def say(self, text: str) -> None:
        os.write(self.output, f"{text}\n".encode())

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for item in session.items:
            self.items[item.nodeid.split("::")[0]].append(item)
        for found in gc.get_objects():
            if type(found) is types.FunctionType and found.__code__.co_filename.startswith(str(self.tree)):
                self.functions[found.__code__.co_filename].append(found)
        gc.freeze()  # a collection in a forked process would copy every page
        self.work(self)
        return True

    def pytest_runtest_logstart(self) -> None:
        self.used = cpu_seconds()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(cpu_seconds() - self.used, 3)}
            append(self.folder / "reports", row)

    def run(
        self, items: Sequence[pytest.Item], changed: Mapping[str, str], limit: float, stops: bool = False
    ) -> tuple[int, dict[str, Any]]:
        """Run tests in a forked process whose modules are changed, as are the files that its programs import.

        Args:
            changed: sources of modules, by file.
            limit: seconds of the processor; of the clock, ten times as many.
            stops: the first that fails is the last.

        Returns:
            The status, or the negative number of the signal that ended the process; outcome and seconds of each test.
        """
        (self.folder / "reports").write_text("")
        put(self.tree, changed)
        pid = os.fork()
        if pid == 0:
            status = 3
            try:
                limit_process(limit)
                for file, source in changed.items():
                    patch(self.functions[str(self.tree / "src" / "paceline" / file)], file, source)
                status = self.run_items(items, stops)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        status = wait_for(pid, time.monotonic() + 60 + 10 * limit)
        put(self.tree, {file: source_of(file) for file in changed})
        return status, {row.pop("test"): row for row in read(self.folder / "reports")}

    def run_items(self, items: Sequence[pytest.Item], stops: bool) -> int:
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if stops and any(row["outcome"] == "failed" for row in read(self.folder / "reports")):
                return 1
        return 0


def put(tree: Path, changed: Mapping[str, str]) -> None:
    """Write modules; their times differ from those before, so that no compiled file of another is taken for one."""
    for file, source in changed.items():
        path = tree / "src" / "paceline" / file
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()
        path.write_text(source, encoding="utf-8")
        moment = next(MOMENTS)
        os.utime(path, (moment, moment))


@dataclass(frozen=True)
class Work:
    """The options of a run of mutants.

    Attributes:
        tree: a copy of the working tree.
        store: the folder of results.
        output: the file descriptor for progress.
        seconds: of a mutant's tests.
        is_whole: whole files are run, not only the tests that reach a mutant.
        files: with the tests that may be run.
        is_part: they are a part of the suite; mutants that none of them reaches are left for another run.
    """

    tree: Path
    store: Path
    output: int
    seconds: float
    is_whole: bool
    files: Sequence[str]
    is_part: bool

    def tests_of(self, mutant: Mutant) -> list[str]:
        return Reach(self.store).choose(mutant, self.seconds, self.is_whole, self.files)

    def collect(self, files: Sequence[str], call: Callable[[Bench], None]) -> int:
        """Collect test files in a forked process, and call a function there. Returns the status of the process."""
        pid = os.fork()
        if pid:
            return wait_for(pid, math.inf)
        status = 3
        try:
            os.setsid()
            log = os.open(self.tree.parent / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for number in (1, 2):
                os.dup2(log, number)
            os.chdir(self.tree)
            sys.path.insert(0, str(self.tree / "src"))
            os.environ.update(PYTHONPATH=str(self.tree / "src"), PYTEST_DEBUG_TEMPROOT=str(self.tree.parent))
            words = [*files, "-m", "not slow and not nightly and not xla", "-p", "no:cacheprovider", "--timeout=0"]
            words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins that the libraries have imported
            status = int(pytest.main(words, plugins=[Bench(self.tree, self.store, self.output, call)]))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def run(self, files: Sequence[str], every: Sequence[Mutant], mutants: Sequence[Mutant]) -> int:
        """Find the tests of the sample, and run those of some mutants. Returns 0, or what went wrong in pytest."""

        def call(bench: Bench) -> None:
            find_tests(bench, every)
            for mutant in mutants:
                tests = self.tests_of(mutant)
                if (tests or not self.is_part) and is_in_a_function(mutant):
                    run_mutant(bench, mutant, tests, self.seconds)

        status = self.collect(files, call)
        for mutant in mutants:
            if status == 0 and (self.tests_of(mutant) or not self.is_part) and not is_in_a_function(mutant):
                self.run_outside_functions(mutant)
        return status

    def run_outside_functions(self, mutant: Mutant) -> None:
        """A mutant of what runs when a module is imported: its tests are collected with it in place."""
        tests = self.tests_of(mutant)
        files = sorted({test.split("::")[0] for test in tests})
        before = len(read(self.store / "results.jsonl"))
        put(self.tree, {mutant.file: mutated(mutant.file, mutant.operator, mutant.occurrence) or ""})
        status = 0
        if files:
            status = self.collect(files, lambda bench: run_mutant(bench, mutant, tests, self.seconds, is_imported=True))
        put(self.tree, {mutant.file: source_of(mutant.file)})
        if len(read(self.store / "results.jsonl")) == before:
            keep(self.store, mutant, f"status {status} of the collection" if status else "", 0.0)


def wait_for(pid: int, end: float) -> int:
    """The status of a process, which is killed at `end`, with what it started."""
    done, status = 0, 0
    try:
        while not done and time.monotonic() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            time.sleep(0.02)
    finally:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        if not done:
            status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status)


def limit_process(seconds: float) -> None:
    """A session of its own, and limits of memory and of the processor's time."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    end = int(cpu_seconds() + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (end, end + 5))  # equal ones would end it with SIGKILL


def cpu_seconds() -> float:
    own, others = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


def patch(functions: Sequence[types.FunctionType], file: str, source: str) -> None:
    """Give the functions of an imported module the code that they have in another source of it."""
    old, new = (functions_of(compile(text, file, "exec")) for text in (source_of(file), source))
    codes = {(was.co_qualname, was.co_firstlineno): code for was, code in zip(old, new, strict=True)}
    for function in functions:
        function.__code__ = codes[function.__code__.co_qualname, function.__code__.co_firstlineno]


def functions_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of each function and class, as they stand in the source."""
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield each
            yield from functions_of(each)


def outline(code: types.CodeType) -> tuple[Any, ...]:
    """Returns the code that runs when a module is imported: that outside of its functions."""
    within = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    classes = [outline(each) for each in within if not each.co_flags & inspect.CO_OPTIMIZED]
    values = [repr(each) for each in code.co_consts if not isinstance(each, types.CodeType)]
    return code.co_code, code.co_names, values, classes


def is_in_a_function(mutant: Mutant) -> bool:
    after = mutated(mutant.file, mutant.operator, mutant.occurrence) or ""
    old, new = (compile(source, mutant.file, "exec") for source in (source_of(mutant.file), after))
    return outline(old) == outline(new)


def run_mutant(bench: Bench, mutant: Mutant, tests: Sequence[str], seconds: float, is_imported: bool = False) -> None:
    """Run the tests of one mutant, which may be imported already, and keep the verdict."""
    started = time.monotonic()
    by_name = {item.nodeid: item for items in bench.items.values() for item in items}
    items = [by_name[test] for test in tests if test in by_name]
    after = mutated(mutant.file, mutant.operator, mutant.occurrence) or ""
    changed = {} if is_imported else {mutant.file: after}
    status, reports = bench.run(items, changed, 20 + 5 * seconds, stops=True) if items else (0, {})
    by = killed_by(status, reports)
    keep(bench.store, mutant, by, time.monotonic() - started, tests=len(items), ran=len(reports), status=status)
    bench.say(f"{mutant.name}: {f'killed by {by}' if by else 'not killed'}, {len(reports)} tests")


def keep(store: Path, mutant: Mutant, by: str, seconds: float, **more: int) -> None:
    """Keep a verdict. A mutant is cut off if its process was killed before its tests were through."""
    verdict = "killed" if by else "cut off" if more.get("status") == -signal.SIGKILL else "survived"
    row = {**asdict(mutant), "name": mutant.name, "verdict": verdict, "by": by, "seconds": round(seconds, 1), **more}
    append(store / "results.jsonl", row)


def killed_by(status: int, reports: Mapping[str, Any]) -> str:
    """The test that failed, or what else ended the run; empty if the mutant survived.

    An error outside the tests, and too much time of the clock, tell nothing: the mutant counts as one that survived.
    """
    failed = [test for test, report in reports.items() if report["outcome"] == "failed"]
    if failed:
        return failed[0]
    if status < 0 and status != -signal.SIGKILL:
        return "the processor's time" if status == -signal.SIGXCPU else f"signal {-status}"
    return ""


def check_killers(bench: Bench) -> None:
    """Run the tests that killed, of the given files, on the tree as it is.

    Mutants whose test does not pass there lose their verdict.
    """
    rows = {row["name"]: row for row in read(bench.store / "results.jsonl")}
    killers = {row["by"] for row in rows.values() if row["by"].split("::")[0] in bench.items}
    items = [item for items in bench.items.values() for item in items if item.nodeid in killers]
    _, reports = bench.run(items, {}, 3600)
    for row in rows.values():
        if row["by"] in killers and reports.get(row["by"], {}).get("outcome") != "passed":
            append(bench.store / "results.jsonl", {**row, "verdict": None})
            bench.say(f"{row['name']}: {row['by']}")


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
    lines = ["| group | mutants | killed | survived | cut off |", "|---|---|---|---|---|"]
    for group in [*GROUPS, "all"]:
        names = [each.name for each in mutants if group in (each.group, "all")]
        counts = Counter(results[name]["verdict"] for name in names if name in results)
        share = f" ({counts['killed'] / counts.total():.0%})" if counts else ""
        numbers = f"{counts['killed']}{share} | {counts['survived']} | {counts['cut off']}"
        lines.append(f"| {group} | {counts.total()} | {numbers} |")
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
    parser.add_argument("--tests", nargs="*", help="files and folders to take tests from, if not all")
    parser.add_argument("--seconds", type=float, default=90, help="of a mutant's tests (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="run those that were not killed")
    parser.add_argument("--whole", action="store_true", help="run whole files, not only the tests that reach a mutant")
    parser.add_argument("--check", action="store_true", help="run the tests that killed on the tree as it is")
    parser.add_argument("--list", action="store_true", help="print the sample and run nothing")
    parser.add_argument("--table", action="store_true", help="print the tables and run nothing")
    parser.add_argument("--store", type=Path, default=ROOT / "build" / "mutation")
    options = parser.parse_args()
    store: Path = options.store.resolve()  # the tests run in another folder
    store.mkdir(parents=True, exist_ok=True)
    every = [mutant for group in GROUPS for mutant in kept_sample(store, group, options.each, options.seed)]
    mutants = [mutant for mutant in every if mutant.group in options.group]
    if options.table or options.list:
        listed = "\n".join(f"{each.name}  was  {each.before}" for each in mutants)
        print(table(mutants, store) if options.table else listed)
        return 0
    verdicts = {row["name"]: row["verdict"] for row in read(store / "results.jsonl")}
    wanted = ("survived", "cut off") if options.again else (None,)
    mutants = in_turn([each for each in mutants if verdicts.get(each.name) in wanted])
    files = test_files(options.tests or ["tests"])
    preload(store, files)
    with tempfile.TemporaryDirectory(prefix="paceline-mutants-") as folder:
        tree = copy_tree(Path(folder))
        work = Work(tree, store, os.dup(1), options.seconds, options.whole, files, bool(options.tests))
        status = work.collect(files, check_killers) if options.check else work.run(files, every, mutants)
        if status:
            print((tree.parent / "output").read_text()[-5000:])
    return status


def in_turn(mutants: Sequence[Mutant]) -> list[Mutant]:
    """One of each group, the second of each, and so on: a run that is cut short has as many of each."""
    seen: Counter[str] = Counter()
    turns: dict[str, int] = {}
    for mutant in mutants:
        turns[mutant.name] = seen[mutant.group]
        seen[mutant.group] += 1
    return sorted(mutants, key=lambda mutant: turns[mutant.name])


def preload(store: Path, files: Sequence[str]) -> None:
    """Import the large libraries of test files, with the environment that tests/conftest.py gives them."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    os.environ.update(HF_HOME=str(store / "cache"), TORCH_EXTENSIONS_DIR=str(store / "torch_extensions"))
    for folder, names in PRELOADED.items():
        for name in names if any(file.startswith(folder) for file in files) else ():
            importlib.import_module(name)


def test_files(words: Sequence[str]) -> list[str]:
    """The test files that are given, and those of folders that are."""
    given = [ROOT / word for word in words]
    paths = {path for each in given for path in (each.rglob("test_*.py") if each.is_dir() else [each])}
    files = [path.relative_to(ROOT).as_posix() for path in sorted(paths)]
    return [file for file in files if file not in NOT_RUN]


if __name__ == "__main__":
    sys.exit(main())
