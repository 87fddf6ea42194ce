"""The rules of docs/architecture.md, as tests: layers, budgets, laziness, no hidden state."""

from __future__ import annotations

import ast
import fnmatch
import functools
import io
import json
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.core.optional import is_installed

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "paceline"
PATHS = sorted(path for path in PACKAGE.rglob("*.py") if not any(part.startswith(".") for part in path.parts))
BESIDE = ("tests", "benchmarks", "tools", "examples", "launch")
PATHS_BESIDE = sorted(path for folder in BESIDE for path in (ROOT / folder).rglob("*.py"))

# low to high: a module imports only from its own layer and from those before it
LAYERS = [
    {"args"},
    {"core"},
    {"checkpoint"},
    {"report", "predictions"},
    {"callbacks", "hub"},
    {"search"},
    {"pytorch.data", "pytorch.model", "pytorch.optim", "pytorch.distributed"},
    {"pytorch.checkpoint"},
    {"pytorch.probes", "pytorch.sync", "pytorch.engine", "pytorch.evaluation"},
    {"pytorch", "tensorflow"},
    {"compat"},
    {"facades"},
    {"drop_in", "compat.drop_in", "compat.older_imports"},
    {"cli", "__main__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
TOP_PACKAGES = {"args", "core", "checkpoint", "report", "predictions", "callbacks", "hub", "search"} | {
    "pytorch",
    "tensorflow",
    "compat",
    "cli",
}
DOORS = {"__init__", "__main__", "drop_in"}
OTHER_FRAMEWORK = {"pytorch": "paceline.tensorflow", "tensorflow": "paceline.pytorch"}
# the classes that users name; all else is below them
FACADES = {"paceline.pytorch.trainer", "paceline.pytorch.seq2seq", "paceline.tensorflow.trainer"} | {
    "paceline.pytorch.members.trainer"
}

# give each part of a facade what it works on: a second file of the facade
ASSEMBLIES = {
    "paceline.pytorch.doctor.case",
    "paceline.pytorch.doctor.parallel_check",
    "paceline.pytorch.forecast.copied_pipeline",
    "paceline.pytorch.forecast.copied_stage",
    "paceline.pytorch.forecast.copied_zero",
    "paceline.pytorch.forecast.preview",
    "paceline.pytorch.parts",
    "paceline.tensorflow.parts",
}
ASSEMBLIES |= {"paceline.pytorch.within_evaluation"}

# what a layer may import beside the standard library, when it is imported itself; all else goes through
# core.optional.require
THIRD_PARTY = {
    "args": {"yaml"},
    "core": {"numpy"},
    "checkpoint": set(),
    "report": {"numpy"},
    "predictions": {"numpy"},
    "callbacks": {"numpy"},
    "hub": set(),
    "search": set(),
}
DEFAULT_THIRD_PARTY = {"numpy", "safetensors", "torch", "yaml"}

FILE_LINES, FUNCTION_LINES, NESTING, COMPLEXITY = 400, 50, 4, 16
FILE_LINES_OF = {"pytorch/trainer.py": 547}  # the facade: public methods of one line, and late imports
MOST_ASSIGNED = 3
MOST_ANY = 0.10
MOST_MODULES = 140  # of the package, which the import of the Trainer loads

# Every exception to a rule, with its reason; * stands for any text. One that is no longer needed fails.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("file lines", "args/sections.py"): "a table of fields: every option, documented beside its default",
    ("module state", "args/*"): "memoised readings of a class's types and signature: pure, and asked once per option",
    (
        "module state",
        "core/record.py:_installed_version",
    ): "versions of installed packages, whose metadata takes milliseconds to read",
    ("module state", "callbacks/reporters/service.py:ServiceReporter.*"): "a client's active run is one of the process",
    ("module state", "compat/drop_in.py:*install"): "the record of what was replaced in other modules, to put it back",
    ("module state", "tensorflow/devices.py:the_only"): "strategies share a table of TensorFlow's process",
    ("environment variables", "pytorch/distributed/random.py:enable_full_determinism"): "libraries read them there",
    (
        "complexity",
        "callbacks/flow.py:DefaultFlowCallback.on_step_end",
    ): "a list of conditions; each call costs every step",
    ("complexity", "core/loop.py:Loop.run_epoch"): "an epoch, read top to bottom; each call would cost every step",
    ("complexity", "pytorch/engine.py:Engine.*"): "an optimizer step, read top to bottom; each call costs every step",
    ("complexity", "tensorflow/objective.py:Objective.kind_of"): "a table of the shapes of losses and labels",
    ("parts never see the Trainer", "callbacks/jit_checkpoint.py:*.set_trainer"): "a name of the Hugging Face library",
    ("parts never see the Trainer", "callbacks/reporters/neptune.py:*.get_run"): "a name of the Hugging Face library",
    ("parts never see the Trainer", "core/state.py:TrainerState.init_training_references"): "a public name, as there",
    ("parts never see the Trainer", "pytorch/replay/step.py:*"): "a public function that is given a Trainer",
    ("parts never see the Trainer", "predictions/ensemble.py:*"): "a public function that is given a Trainer",
    ("parts never see the Trainer", "tensorflow/ensemble.py:*"): "works for that function, with its Trainer",
    ("parts never see the Trainer", "pytorch/ensembles/host.py:*"): "works for that function, with its Trainer",
    ("parts never see the Trainer", "pytorch/members/search.py:*"): "a public function that is given a Trainer",
    ("one owner", "pytorch/ensembles/host.py:in_place"): "the Trainer's model, put back after each member",
    ("one owner", "tensorflow/ensemble.py:in_place"): "the Trainer's model, put back after each member",
    ("file lines", "pytorch/session.py"): "makes every part for torch, one function each",
    ("one owner", "args/secrets.py:*"): "a log record, which is masked for those who read it next",
    ("one owner", "cli/*"): "records and tokenizers that the command made",
    ("one owner", "callbacks/reporters/trackio.py:*"): "the tags of a model, by which the hub shows its Space",
    ("one owner", "callbacks/progress.py:*"): "a bar that the callback made",
    ("one owner", "callbacks/terminal_bar.py:_LinesOfStream.*"): "the write method of a stream, put back at the end",
    ("one owner", "core/fingerprint.py:_set_state"): "numpy's generator, whose state is put back after rows were read",
    ("one owner", "core/events.py:*"): "the handler clears the flag whose event it fires; a decorator marks a function",
    ("one owner", "core/said_once.py:*"): "a log record, which is hidden from the handlers after it",
    ("one owner", "pytorch/model/missing_labels.py:*"): "an error, whose message it completes",
    ("one owner", "compat/trial_runs.py:TrialWatch.*"): "a callback answers through the control",
    ("one owner", "pytorch/parts.py:*"): "a second file of the facade",
    ("one owner", "core/phases/progress.py:*"): "a callback answers through the control",
    ("one owner", "pytorch/short_runs/lr_search.py:*"): "a callback answers through the control",
    ("one owner", "pytorch/members/watch.py:*"): "a callback answers through the control",
    ("one owner", "pytorch/replay/step.py:StopAfter.*"): "a callback answers through the control",
    ("one owner", "pytorch/short_runs/batch_search.py:StepClock.*"): "a callback answers through the control",
    ("one owner", "tensorflow/adapters.py:*"): "a callback answers through the control",
    ("one owner", "tensorflow/optim/following.py:*"): "a schedule sets the rate of its optimizer",
    ("one owner", "pytorch/data/indexed.py:*"): "torch's sampler, which draws a seed, and torch's loader",
    ("one owner", "pytorch/distributed/*"): "attributes of torch: parameters, modules, contexts of autograd functions",
    ("one owner", "pytorch/probes/loss.py:*"): "a flag of DDP, put back after the probe",
    ("one owner", "pytorch/model/checkpointing.py:*"): "the momentum of batch norm, put back after recomputing",
    ("one owner", "pytorch/model/cuda_graphs.py:*"): "torch's compiled call of a module, dropped with its compilation",
    ("one owner", "pytorch/model/fp8.py:*"): "the class of a layer, given back after training",
    ("one owner", "pytorch/optim/layerwise.py:*"): "gradients, freed once they are applied",
    ("one owner", "pytorch/sync.py:ProcessSync.__init__"): "the number of ranks, which the normalizer scales by",
    ("the plan is read", "Plan.*_strategy"): "recorded in run.json; callbacks are given the live arguments",
    ("the plan is read", "Plan.eval_batch_size"): "recorded in run.json; an evaluation may run without a plan",
    ("the plan is read", "Plan.num_train_epochs"): "recorded in run.json",
    ("the plan is read", "Plan.notes"): "logged with the plan",
    ("the plan decides", "*/session.py"): "the session, which hands values on",
    ("the plan decides", "core/loop.py"): "max_steps and the JIT checkpoint are live: a callback may change them",
    ("the plan decides", "core/state.py"): "a public method of the Hugging Face library's state",
    ("the plan decides", "pytorch/pruning/callback.py"): "a callback is given the arguments",
    ("the plan decides", "pytorch/ensembles/snapshots.py"): "a callback is given the arguments",
    ("the plan decides", "pytorch/members/checks.py"): "refuses options before there is a plan, in one place",
    ("the plan decides", "checkpoint/retention.py"): "makes a Retention of them, in one place",
    ("the plan decides", "pytorch/data/loading.py"): "makes the options of the workers of them, in one place",
    ("the plan decides", "pytorch/distributed/*"): "a strategy is made of the options that configure it alone",
    ("the plan decides", "pytorch/optim/*"): "an optimizer is made of the options that configure it alone",
    (
        "the plan decides",
        "pytorch/model/compilation.py",
    ): "made of the options that configure it alone",
    (
        "the plan decides",
        "pytorch/model/prepare.py",
    ): "made of the options that configure it alone",
    ("the plan decides", "tensorflow/adapters.py"): "a callback of Keras is given the arguments",
    ("the plan decides", "tensorflow/arguments.py"): "the arguments themselves",
    ("the plan decides", "tensorflow/devices.py"): "the devices are made of the options that name them",
}


# ---- reading the source


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Returns every node of a file; many rules look at all of them."""
    return tuple(ast.walk(tree_of(path)))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in PATHS}
LOWER_FILES = [path for path in PATHS if path.parent != PACKAGE or path.name != "__init__.py"]


def layer_of(module: str) -> str:
    """Returns the layer of a module: `paceline.core.loop` -> `core`; for the package itself, of lazy names, ``."""
    if module in FACADES:
        return "facades"
    parts = module.split(".")[1:]
    inner = ".".join(parts[:2])
    return inner if inner in RANK else ".".join(parts[:1])


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def imports_of(path: Path) -> tuple[tuple[str, bool], ...]:
    """Returns (module, True inside a function) of every import but those for the type checker."""
    return tuple(find_imports(path))


def find_imports(path: Path) -> Iterator[tuple[str, bool]]:
    pending: list[tuple[ast.AST, bool]] = [(tree_of(path), False)]
    while pending:
        node, is_inside = pending.pop()
        if isinstance(node, ast.expr) or is_type_checking(node):  # no expression holds an import
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, is_inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            for alias in node.names:
                full = f"{module}.{alias.name}"
                yield (full if full in MODULES else module, is_inside)
        inside = is_inside or isinstance(node, FUNCTIONS)
        pending.extend((child, inside) for child in ast.iter_child_nodes(node))


def imports_for_types(path: Path) -> Iterator[str]:
    """Modules that are imported for the type checker alone."""
    for block in filter(is_type_checking, nodes_of(path)):
        for node in ast.walk(block):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    yield full if full in MODULES else str(node.module)


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    """Parameters but `self` and `cls`, `*args` and `**kwargs`."""
    arguments = node.args
    found = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [argument for argument in found if argument.arg not in {"self", "cls"}]


def functions_of(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """(qualified name, node) of every function that is not inside another one."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, FUNCTIONS):
                yield prefix + child.name, child
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            else:
                yield from walk(child, prefix)

    yield from walk(tree_of(path), "")


@functools.cache
def code_lines(path: Path) -> frozenset[int]:
    """Numbers of the lines that hold code: no blank ones, comments or docstrings."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
    lines: set[int] = set()
    for token in tokenize.tokenize(io.BytesIO(path.read_bytes()).readline):
        if token.type not in skipped and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in nodes_of(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return frozenset(lines)


# ---- the rules: each yields (place, what is wrong)

Findings = Iterator[tuple[str, str]]
RULES: dict[str, Callable[[], Findings]] = {}


def rule(name: str) -> Callable[[Callable[[], Findings]], Callable[[], Findings]]:
    def register(find: Callable[[], Findings]) -> Callable[[], Findings]:
        RULES[name] = find
        return find

    return register


@rule("known layer")
def find_unknown_layers() -> Findings:
    for path in LOWER_FILES:
        if layer_of(module_of(path)) not in RANK:
            yield name_of(path), "belongs to no layer: add it to LAYERS and to docs/architecture.md"
        top = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if top not in TOP_PACKAGES | DOORS:
            yield name_of(path), "is no package of docs/architecture.md, and no public door"


@rule("one-way imports")
def find_upward_imports() -> Findings:
    for path in LOWER_FILES:
        own = layer_of(module_of(path))
        for module, is_inside in imports_of(path):
            other = layer_of(module) if module.split(".")[0] == "paceline" else ""
            if not other or is_inside or own not in RANK:
                continue
            if module.startswith(OTHER_FRAMEWORK.get(module_of(path).split(".")[1], "-")):
                yield name_of(path), f"imports {module}: neither framework knows the other"
            if {own, other} == {"callbacks", "hub"}:
                yield name_of(path), f"imports {module}: neither package knows the other"
            if RANK.get(other, -1) > RANK[own]:
                yield name_of(path), f"imports {module}: {own} is below {other}"


@rule("third-party imports")
def find_third_party_imports() -> Findings:
    for path in LOWER_FILES:
        own = layer_of(module_of(path))
        allowed = THIRD_PARTY.get(own, DEFAULT_THIRD_PARTY)
        for module, is_inside in imports_of(path):
            top = module.split(".")[0]
            if is_inside or top in sys.stdlib_module_names or top in {"paceline", *allowed}:
                continue
            yield name_of(path), f"imports {module} when it is imported: {own} may import {sorted(allowed)}"


@rule("function-level imports")
def find_function_level_imports() -> Findings:
    for path in LOWER_FILES:
        for module, is_inside in imports_of(path):
            is_sanctioned = layer_of(module_of(path)) == "args" and module == "paceline.pytorch.distributed.world"
            if is_inside and not is_sanctioned:
                yield name_of(path), f"imports {module} inside a function: use core.optional.require"


@rule("import cycles")
def find_import_cycles() -> Findings:
    """Between modules, imports for the type checker included, and between the packages of one layer."""
    modules: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        modules[module] = {
            other for other, is_inside in imports_of(path) if other in MODULES and not is_inside and other != module
        }
    with_types = {module: others | types_of(module) for module, others in modules.items()}
    packages: dict[str, set[str]] = {}
    for module, others in modules.items():
        own = layer_of(module)
        packages.setdefault(own, set()).update(layer_of(other) for other in others if layer_of(other) not in {own, ""})
    for graph in (with_types, packages):
        cycle = find_cycle(graph)
        if cycle:
            yield cycle[0], " -> ".join(cycle)


def types_of(module: str) -> set[str]:
    """Modules that one imports for the type checker; those that may name a Trainer need not count it."""
    found = {other for other in imports_for_types(MODULES[module]) if other in MODULES}
    may_name_one = module in ASSEMBLIES or layer_of(module) == "compat"
    return found - FACADES if may_name_one else found


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    done: set[str] = set()

    def visit(node: str, trail: list[str]) -> list[str]:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node in done:
            return []
        for other in sorted(graph.get(node, ())):
            cycle = visit(other, [*trail, node])
            if cycle:
                return cycle
        done.add(node)
        return []

    return next((cycle for node in sorted(graph) if (cycle := visit(node, []))), [])


@rule("file names")
def find_bad_names() -> Findings:
    for path in PATHS:
        if path.stem in {"utils", "helpers", "common", "misc", "util", "helper"}:
            yield name_of(path), "says nothing about what it holds"


@rule("file lines")
def find_long_files() -> Findings:
    for path in PATHS:
        limit = FILE_LINES_OF.get(name_of(path), FILE_LINES)
        if len(code_lines(path)) > limit:
            yield name_of(path), f"{len(code_lines(path))} code lines of {limit}"


@rule("function lines")
def find_long_functions() -> Findings:
    for path in PATHS:
        for name, node in functions_of(path):
            body = code_lines(path) & set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            if len(body) > FUNCTION_LINES:
                yield f"{name_of(path)}:{name}", f"{len(body)} code lines of {FUNCTION_LINES}"


@rule("nesting")
def find_deep_functions() -> Findings:
    blocks = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)

    def depth(node: ast.AST) -> int:
        deepest = 0
        for field, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if not isinstance(child, ast.AST):
                    continue
                is_elif = field == "orelse" and isinstance(node, ast.If) and len(node.orelse) == 1
                is_block = isinstance(child, blocks) and not (is_elif and isinstance(child, ast.If))
                deepest = max(deepest, depth(child) + is_block)
        return deepest

    for path in PATHS:
        for name, node in functions_of(path):
            if depth(node) > NESTING:
                yield f"{name_of(path)}:{name}", f"{depth(node)} blocks deep, of {NESTING}"


@rule("complexity")
def find_complex_functions() -> Findings:
    """Counts branches, conditional expressions, and each `and` and `or`."""
    branches = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case, ast.IfExp)
    for path in PATHS:
        for name, node in functions_of(path):
            nodes = list(ast.walk(node))
            number = 1 + sum(isinstance(child, branches) for child in nodes)
            number += sum(len(child.values) - 1 for child in nodes if isinstance(child, ast.BoolOp))
            if number > COMPLEXITY:
                yield f"{name_of(path)}:{name}", f"cyclomatic complexity {number} of {COMPLEXITY}"


@rule("packed expressions")
def find_packed_expressions() -> Findings:
    """No conditional expression inside another, no assignment of many things in one line."""
    for path in PATHS:
        for node in nodes_of(path):
            if isinstance(node, ast.IfExp) and any(isinstance(part, ast.IfExp) for part in (node.body, node.orelse)):
                yield name_of(path), f"line {node.lineno}: {ast.unparse(node)}"
            if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Tuple):
                continue
            stored = sum(isinstance(target, ast.Attribute) for target in node.targets[0].elts)
            if stored > MOST_ASSIGNED and isinstance(node.value, ast.Tuple):
                yield name_of(path), f"line {node.lineno} assigns {stored} attributes"


@rule("parts never see the Trainer")
def find_trainer_parameters() -> Findings:
    """Only the facades and `compat` are given a Trainer; `cli` is above them."""
    for path in PATHS:
        if module_of(path) in FACADES | ASSEMBLIES or layer_of(module_of(path)) in {"compat", "cli"}:
            continue
        for name, node in functions_of(path):
            for parameter in parameters_of(node):
                kind = ast.unparse(parameter.annotation) if parameter.annotation is not None else ""
                if parameter.arg == "trainer" or re.search(r"\b(TF|Seq2Seq)?Trainer\b", kind):
                    yield f"{name_of(path)}:{name}", f"is given {parameter.arg}: {kind}"


@rule("one owner")
def find_foreign_stores() -> Findings:
    """No function assigns to an attribute of an object that it was given.

    The loop owns `state` and `control`; a callback answers through `control`.
    """
    for path in PATHS:
        for name, node in functions_of(path):
            given = {parameter.arg for parameter in parameters_of(node)} - {"ctx"}  # of an autograd function
            if layer_of(module_of(path)) == "callbacks":
                given -= {"control"}
            for child in ast.walk(node):
                if isinstance(child, ast.Attribute) and is_stored(child) and root_of(child) in given:
                    yield f"{name_of(path)}:{name}", f"assigns {ast.unparse(child)}"


@rule("the plan decides")
def find_readers_of_arguments() -> Findings:
    """Below the session nobody reads the arguments, but for the parts that are made of them."""
    for path in PATHS:
        if module_of(path) in FACADES | ASSEMBLIES or layer_of(module_of(path)) in {
            "args",
            "compat",
            "cli",
            "callbacks",
        }:
            continue
        names = {
            node.attr
            for node in nodes_of(path)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in {"args", "self.args"}
        }
        if names:
            yield name_of(path), f"reads {', '.join(sorted(names))}"


@rule("the plan is read")
def find_unread_decisions() -> Findings:
    """A decision that nothing reads is no decision."""
    plan = next(node for node in nodes_of(PACKAGE / "args" / "plan.py") if getattr(node, "name", "") == "Plan")
    fields = {node.target.id for node in plan.body if isinstance(node, ast.AnnAssign)}  # type: ignore[attr-defined]
    for path in PATHS:
        if name_of(path) != "args/plan.py":
            for node in nodes_of(path):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] == "plan":
                    fields.discard(node.attr)
    yield from ((f"Plan.{field}", "has no reader but its own description") for field in sorted(fields))


@rule("typed parameters")
def find_untyped_parameters() -> Findings:
    """The share of parameters that are bare `Any`."""
    kinds = [
        ast.unparse(parameter.annotation) if parameter.annotation is not None else "Any"
        for path in PATHS
        for _, node in functions_of(path)
        for parameter in parameters_of(node)
    ]
    share = kinds.count("Any") / len(kinds)
    if share > MOST_ANY:
        yield "the package", f"{kinds.count('Any')} of {len(kinds)} parameters are Any, {share:.1%} of {MOST_ANY:.0%}"


@rule("backend names")
def find_backend_names() -> Findings:
    """The loop, the engines and the Trainer know no backend: a strategy is one file of `distributed`."""
    names = r"(?<![a-z])(?<!process_)(ddp|fsdp|deepspeed|xla|tpu|pipeline|zero)(?![a-z])"  # is_world_process_zero
    backend = re.compile(names, re.IGNORECASE)
    patterns = ["core/loop.py", "pytorch/engine.py", "pytorch/sync.py", "pytorch/evaluation/*", "pytorch/trainer.py"]
    patterns += ["pytorch/session.py", "pytorch/checkpoint/checkpointer.py"]
    for path in PATHS:
        if not any(path.relative_to(PACKAGE).match(pattern) for pattern in patterns):
            continue
        source = path.read_text(encoding="utf-8").splitlines()
        for number in sorted(code_lines(path)):
            if backend.search(source[number - 1].split("  # ")[0]):
                yield name_of(path), f"line {number}: {source[number - 1].strip()}"


@rule("module state")
def find_module_state() -> Findings:
    """Nothing at module level changes after import: no `global`, no cache, no container written from a function."""
    changing = {"append", "add", "update", "setdefault", "pop", "popitem", "clear", "extend", "insert", "remove"}
    for path in PATHS:
        targets = {ast.unparse(target) for node in tree_of(path).body for target in assigned_by(node)}
        for name, function in functions_of(path):
            place = f"{name_of(path)}:{name}"
            local = {argument.arg for argument in ast.walk(function) if isinstance(argument, ast.arg)}
            local |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and is_stored(node)}
            shared = targets - local
            for node in ast.walk(function):
                if isinstance(node, ast.Global):
                    yield place, f"global {', '.join(node.names)}"
                if isinstance(node, ast.Subscript | ast.Attribute) and is_stored(node) and root_of(node) in shared:
                    yield place, f"writes {ast.unparse(node)}"
                called = node.func if isinstance(node, ast.Call) else None
                if isinstance(called, ast.Attribute) and called.attr in changing and root_of(called) in shared:
                    yield place, f"calls {ast.unparse(called)}"
            decorators = {ast.unparse(decorator) for decorator in function.decorator_list} - {"cached_property"}
            if any("cache" in decorator for decorator in decorators):
                yield place, "caches at module or class level"


def assigned_by(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def is_stored(node: ast.expr) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


@rule("environment variables")
def find_environment_writes() -> Findings:
    """Variables are no message bus: they are read, never written."""
    for path in PATHS:
        for name, function in functions_of(path):
            for node in ast.walk(function):
                is_write = isinstance(node, ast.Subscript) and is_stored(node) and "os.environ" in ast.unparse(node)
                called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                if is_write or re.fullmatch(r"os\.(putenv|unsetenv|environ\.(update|setdefault|pop|clear))", called):
                    yield f"{name_of(path)}:{name}", ast.unparse(node)


@rule("extras")
def find_unknown_extras() -> Findings:
    """Each `require(module, extra)` names an extra that can be installed."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for path in PATHS:
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "require" and len(node.args) > 1:
                extra = node.args[1]
                if isinstance(extra, ast.Constant) and extra.value not in extras:
                    yield name_of(path), f"extra {extra.value!r} is not in pyproject.toml"


@rule("docstring openings")
def find_indirect_docstrings() -> Findings:
    """A docstring opens with a plain declarative sentence, in the tests, benchmarks, tools and examples too."""
    documented = (ast.Module, ast.ClassDef, *FUNCTIONS)
    for path in [*PATHS, *PATHS_BESIDE]:
        for node in nodes_of(path):
            text = ast.get_docstring(node) if isinstance(node, documented) else None
            if text and text.split()[0] in {"What", "Whether", "Where", "How", "Who", "Which", "When"}:
                place = f"{path.relative_to(ROOT).as_posix()}:{getattr(node, 'name', '')}"
                yield place, f"opens with {text.split()[0]!r}"


@rule("docstrings")
def find_missing_docstrings() -> Findings:
    for path in PATHS:
        if ast.get_docstring(tree_of(path)) is None:
            yield name_of(path), "the module says nothing about itself"
        for node in tree_of(path).body:
            is_public = isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
            if is_public and ast.get_docstring(node) is None:
                yield f"{name_of(path)}:{node.name}", "is public and has no docstring"


def is_excepted(name: str, place: str) -> bool:
    return any(excepted == name and fnmatch.fnmatchcase(place, pattern) for excepted, pattern in EXCEPTIONS)


@functools.cache
def findings_of(name: str) -> list[tuple[str, str]]:
    return list(RULES[name]())


@pytest.mark.parametrize("name", RULES)
def test_rule(name: str) -> None:
    findings = [f"{place}: {what}" for place, what in findings_of(name) if not is_excepted(name, place)]
    assert not findings, f"{name}:\n" + "\n".join(findings)


def test_exceptions_are_needed() -> None:
    found = {name: [place for place, _ in findings_of(name)] for name in RULES}
    idle = [
        (name, pattern)
        for name, pattern in EXCEPTIONS
        if any(PACKAGE.glob(pattern.split(":")[0])) and not fnmatch.filter(found[name], pattern)
    ]
    assert not idle, f"no longer exceptions: {idle}"
    assert all(reason.strip() for reason in EXCEPTIONS.values())


# ---- what an import costs


def modules_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after `code`."""
    code += "\nimport json, sys\nprint(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(json.loads(result.stdout.splitlines()[-1]))


def test_import_of_the_package_loads_no_framework() -> None:
    loaded = modules_after("import paceline; dir(paceline); paceline.__all__")
    assert not loaded & {"torch", "tensorflow", "numpy", "yaml", "transformers", "datasets", "accelerate"}


def test_arguments_load_no_framework() -> None:
    loaded = modules_after("from paceline import TrainingArguments; TrainingArguments('out', learning_rate=1e-3)")
    assert not loaded & {"torch", "tensorflow", "numpy", "transformers", "datasets", "accelerate"}


# A module whose import takes long is loaded by those who use it: see core.optional.LateModule.
LOADED_STAGES = """
import json, sys, tempfile
stages = [set(sys.modules)]
def stage():
    stages.append(set(sys.modules))
import torch
stage()
from paceline import Trainer, TrainingArguments
stage()
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
    def forward(self, x, labels):
        return {"loss": (self.linear(x) - labels).square().mean()}
samples = [{"x": torch.ones(1), "labels": torch.zeros(1)} for _ in range(4)]
model = Model()
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
for batch in torch.utils.data.DataLoader(samples, batch_size=2):
    model(**batch)["loss"].backward()
    optimizer.step(), schedule.step(), optimizer.zero_grad()
stage()
with tempfile.TemporaryDirectory() as folder:
    options = dict(max_steps=2, save_steps=1, report_to="none", disable_tqdm=True, use_cpu=True)
    Trainer(Model(), TrainingArguments(folder, **options), train_dataset=samples, eval_dataset=samples).train()
    again = Trainer(Model(), TrainingArguments(folder, **options), train_dataset=samples, eval_dataset=samples)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    again.evaluate()
stage()
print(json.dumps([sorted(after - before) for before, after in zip(stages, stages[1:])]))
"""


def heavy_of(modules: list[str], allowed: tuple[str, ...]) -> list[str]:
    """Those of neither the standard library, the package, nor what is allowed beside it."""
    light = {"paceline", *sys.stdlib_module_names}
    return [
        name
        for name in modules
        if name.split(".")[0] not in light and not any(f"{name}.".startswith(f"{other}.") for other in allowed)
    ]


@pytest.fixture(scope="module")
def loaded_stages() -> dict[str, list[str]]:
    """Returns the modules that torch, the package, a loop written by hand, and a Trainer's runs load in addition."""
    result = subprocess.run([sys.executable, "-c", LOADED_STAGES], check=True, capture_output=True, text=True)
    return dict(zip(("torch", "import", "loop", "runs"), json.loads(result.stdout.splitlines()[-1]), strict=True))


def test_the_import_of_the_trainer_loads_nothing_heavy(loaded_stages: dict[str, list[str]]) -> None:
    assert not heavy_of(loaded_stages["import"], ())


def test_the_import_of_the_trainer_loads_no_part_that_only_some_runs_need(loaded_stages: dict[str, list[str]]) -> None:
    own = [name for name in loaded_stages["import"] if name.startswith("paceline")]
    strategies = {"ddp", "fsdp", "deepspeed", "xla", "tensor_parallel", "context_parallel", "pipeline"}
    parts = {f"paceline.pytorch.distributed.{name}" for name in strategies}
    parts |= {"paceline.pytorch.checkpoint.shards", "paceline.args.parser", "paceline.args.yaml_text", "paceline.cli"}
    assert not parts & set(own)
    assert len(own) <= MOST_MODULES, "each costs half a millisecond of every start: load late what few runs need"


def test_runs_load_what_a_loop_written_by_hand_loads(loaded_stages: dict[str, list[str]]) -> None:
    """A run, its checkpoints, a resume and an evaluation."""
    assert not heavy_of(loaded_stages["runs"], ("safetensors", "numpy.ctypeslib", "torch.utils.serialization"))


def test_public_names_are_sorted_and_all_there() -> None:
    import paceline

    assert list(paceline.__all__) == sorted(set(paceline.__all__))
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    assert set(paceline.__all__) <= set(dir(paceline))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = paceline.no_such_name


def test_lazy_names_agree_with_what_type_checkers_see() -> None:
    import paceline

    guarded = next(node for node in tree_of(PACKAGE / "__init__.py").body if is_type_checking(node))
    seen = {
        alias.name: node.module
        for node in ast.walk(guarded)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == paceline._HOMES
    for name, module in seen.items():
        if module.startswith("paceline.tensorflow.") and not is_installed("tensorflow"):
            continue
        assert getattr(paceline, name) is getattr(sys.modules[str(module)], name)


def test_types_are_shipped() -> None:
    assert (PACKAGE / "py.typed").exists()
