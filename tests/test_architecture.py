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

# low to high: a module imports only from its own layer and from those before it
LAYERS = [
    {"args"},
    {"core"},
    {"callbacks", "data", "model", "optim", "distributed", "hub", "tf"},
    {"checkpoint"},
    {"engine", "evaluation", "predictions", "snapshot", "progress"}
    | {"shared_engine", "shared_evaluation", "shared_resuming", "window_engine"},
    {"accelerate_view", "assembly", "counting", "hooks", "loaders", "published"}
    | {"replaying", "saving", "sharded_saving", "subclassing", "training", "uploads"},
    {"trainer"},
    {"seq2seq", "drop_in"},
    {"cli", "__main__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# what a layer may import beside the standard library, when it is imported itself; all else goes through
# core.optional.require
THIRD_PARTY = {"args": {"yaml"}, "core": {"numpy"}, "callbacks": {"numpy"}, "hub": set()}
DEFAULT_THIRD_PARTY = {"numpy", "safetensors", "torch", "yaml"}

FILE_LINES, FUNCTION_LINES, NESTING, COMPLEXITY = 400, 50, 4, 12
FILE_LINES_OF = {"trainer.py": 500}

# Every exception to a rule, with its reason; * stands for any text. One that is no longer needed fails.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("file lines", "args/sections.py"): "a table of fields: every option, documented beside its default",
    ("module state", "args/*"): "memoised readings of a class's types and signature: pure, and asked once per option",
    ("module state", "drop_in.py:*install"): "the record of what was replaced in other modules, to put it back",
    ("module state", "tf/devices.py:the_only"): "strategies share a table of TensorFlow's process, whatever holds them",
    ("environment variables", "distributed/random.py:enable_full_determinism"): "libraries read them nowhere else",
}


# ---- reading the source


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in PATHS}
LOWER_FILES = [path for path in PATHS if path.parent != PACKAGE or path.name != "__init__.py"]


def layer_of(module: str) -> str:
    """`paceline.core.loop` -> `core`; the package itself, which only holds lazy names, -> ``."""
    return module.split(".")[1] if "." in module else ""


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def imports_of(path: Path) -> Iterator[tuple[str, bool]]:
    """(module, whether inside a function) of every import but those for the type checker."""
    pending: list[tuple[ast.AST, bool]] = [(tree_of(path), False)]
    while pending:
        node, is_inside = pending.pop()
        if is_type_checking(node):
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
    for node in ast.walk(tree_of(path)):
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


@rule("one-way imports")
def find_upward_imports() -> Findings:
    for path in LOWER_FILES:
        own = layer_of(module_of(path))
        for module, is_inside in imports_of(path):
            other = layer_of(module) if module.split(".")[0] == "paceline" else ""
            if not other or is_inside or own not in RANK:
                continue
            if own == "tf" and other not in {"tf", "args", "core", "callbacks", "hub"}:
                yield name_of(path), f"imports {module}: tf shares args, core, callbacks and hub only"
            if own == "hub" and other not in {"hub", "args", "core"}:
                yield name_of(path), f"imports {module}: hub serves every framework, and knows none"
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
            is_sanctioned = layer_of(module_of(path)) == "args" and module == "paceline.distributed.world"
            if is_inside and not is_sanctioned:
                yield name_of(path), f"imports {module} inside a function: use core.optional.require"


@rule("import cycles")
def find_import_cycles() -> Findings:
    """Between modules, and between the packages of one layer."""
    modules: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        modules[module] = {
            other for other, is_inside in imports_of(path) if other in MODULES and not is_inside and other != module
        }
    packages: dict[str, set[str]] = {}
    for module, others in modules.items():
        own = layer_of(module)
        packages.setdefault(own, set()).update(layer_of(other) for other in others if layer_of(other) not in {own, ""})
    for graph in (modules, packages):
        cycle = find_cycle(graph)
        if cycle:
            yield cycle[0], " -> ".join(cycle)


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
    branches = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)
    for path in PATHS:
        for name, node in functions_of(path):
            number = 1 + sum(isinstance(child, branches) for child in ast.walk(node))
            if number > COMPLEXITY:
                yield f"{name_of(path)}:{name}", f"cyclomatic complexity {number} of {COMPLEXITY}"


@rule("backend names")
def find_backend_names() -> Findings:
    """The loop, the engines and the Trainer know no backend: a strategy is one file of `distributed`."""
    names = r"(?<![a-z])(?<!process_)(ddp|fsdp|deepspeed|xla|tpu|pipeline|zero)(?![a-z])"  # is_world_process_zero
    backend = re.compile(names, re.IGNORECASE)
    engines = {"engine.py", "window_engine.py", "shared_engine.py", "evaluation.py", "shared_evaluation.py"}
    for path in PATHS:
        if name_of(path) not in {*engines, "core/loop.py", "trainer.py", "training.py", "saving.py"}:
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
            if any("cache" in ast.unparse(decorator) for decorator in function.decorator_list):
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
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "require" and len(node.args) > 1:
                extra = node.args[1]
                if isinstance(extra, ast.Constant) and extra.value not in extras:
                    yield name_of(path), f"extra {extra.value!r} is not in pyproject.toml"


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


@pytest.mark.parametrize("name", RULES)
def test_rule(name: str) -> None:
    findings = [f"{place}: {what}" for place, what in RULES[name]() if not is_excepted(name, place)]
    assert not findings, f"{name}:\n" + "\n".join(findings)


def test_exceptions_are_needed() -> None:
    found = {name: [place for place, _ in find()] for name, find in RULES.items()}
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


def test_the_trainer_loads_torch_and_nothing_optional() -> None:
    loaded = modules_after("from paceline import Trainer, TrainingArguments")
    assert "torch" in loaded
    optional = {"tensorflow", "transformers", "datasets", "accelerate", "sklearn", "pandas", "tensorboard", "peft"}
    assert not loaded & optional


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
        if module.startswith("paceline.tf.") and not is_installed("tensorflow"):
            continue
        assert getattr(paceline, name) is getattr(sys.modules[str(module)], name)


def test_types_are_shipped() -> None:
    assert (PACKAGE / "py.typed").exists()
