"""Checks of a name of the Hugging Face Trainer against paceline, by inspection of the package and by small runs."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import io
import logging
import re
import tempfile
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from paceline.args.errors import UnsupportedOption
from paceline.args.older_names import OLDER_NAMES, Renamed
from paceline.compat.private_names import UNCALLED
from paceline.core.events import TrainerCallback
from paceline.search import backends

paceline: Any = importlib.import_module("paceline")
PACKAGE = Path(str(paceline.__file__)).parent
MISSING = "missing"
LATER_TENSORFLOW = "comes with the TensorFlow side"


class Finding(NamedTuple):
    """same, different, refused or missing; and what there is to say of it."""

    status: str
    note: str


SAME = Finding("same", "")
NOT_THERE = Finding(MISSING, "")


# ---- signatures


def parse(signature: Any) -> dict[str, str]:
    """Parameter -> default as text, "<required>" or, for *args and **kwargs, "<any>"."""
    text = str(signature).strip()
    if not text.startswith("("):
        text = "()" if text in ("()", "", "None") else f"({text})"
    node = ast.parse(f"def f{text}: pass").body[0]
    assert isinstance(node, ast.FunctionDef)
    return parameters_of(node)


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, str]:
    """The parameters of a function in source, `self` left out."""
    positional = [*node.args.posonlyargs, *node.args.args]
    required = len(positional) - len(node.args.defaults)
    found = {arg.arg: "<required>" for arg in positional[:required]}
    found.update({arg.arg: plain(d) for arg, d in zip(positional[required:], node.args.defaults, strict=True)})
    for arg, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        found[arg.arg] = "<required>" if default is None else plain(default)
    for starred, mark in ((node.args.vararg, "*"), (node.args.kwarg, "**")):
        if starred is not None:
            found[mark + starred.arg] = "<any>"
    return {name: default for name, default in found.items() if name not in ("self", "cls")}


def plain(node: ast.expr) -> str:
    """A default as text, the same for the same value; numbers are computed."""
    with contextlib.suppress(ValueError):
        return normal(ast.literal_eval(node))
    text = ast.unparse(node)
    if re.fullmatch(r"[\d\s./*+-]+", text):
        return normal(eval(text))
    return text


def normal(value: Any) -> str:
    """A default as text: 0 and 0.0 are the same, an enumeration's value is what it is written as."""
    if value is inspect.Parameter.empty or value is NO_DEFAULT:
        return "<required>"
    value = getattr(value, "value", value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return repr(float(value))
    return repr(value)


def actual(function: Any) -> dict[str, str]:
    """The parameters of a function or class of ours, as `parse` gives those of the Hugging Face Trainer."""
    found = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            found["*" + parameter.name] = "<any>"
        elif parameter.kind is parameter.VAR_KEYWORD:
            found["**" + parameter.name] = "<any>"
        elif parameter.name not in ("self", "cls"):
            found[parameter.name] = normal(parameter.default)
    return found


def compare(theirs: dict[str, str], ours: dict[str, str]) -> Finding:
    """Compares a signature with the one there: parameters and their defaults. Additional parameters are named."""
    constants = {"PREFIX_CHECKPOINT_DIR": "'checkpoint'"}
    takes_any = any(name.startswith("**") for name in ours)
    notes = []
    for name, default in theirs.items():
        default = constants.get(default, default)
        if name not in ours:
            if not (name.startswith("*") or takes_any):
                notes.append(f"does not take `{name}`")
        elif ours[name] != default:
            is_required = ours[name] == "<required>"
            notes.append(f"`{name}` is required" if is_required else f"`{name}` is {ours[name]} by default")
    more = [f"`{name}`" for name in ours if name not in theirs and not name.startswith("*")]
    if more:
        notes.append(f"also takes {', '.join(more)}")
    shared = [name for name in ours if name in theirs]
    if shared != [name for name in theirs if name in ours]:
        notes.append("the order of the parameters differs")
    return Finding("different", "; ".join(notes)) if notes else SAME


def signature_from(defaults: dict[str, Any]) -> str:
    """A signature from a dict of defaults."""
    return "(" + ", ".join(k if v == "<required>" else f"{k}={written(v)}" for k, v in defaults.items()) + ")"


def written(value: Any) -> str:
    """A default as it stands in source; an expression in the list of names is a text."""
    is_expression = isinstance(value, str) and re.fullmatch(r"\d+ / \d+", value)
    return str(value) if is_expression else repr(value)


# ---- names


def ours(name: str) -> Any:
    """A name of the package's top, or None."""
    return getattr(paceline, name) if name in paceline.__all__ else None


def export(name: str, signature: Any) -> Finding:
    """A function or class at the top of the package."""
    found = ours(name)
    if found is None:
        return NOT_THERE
    return SAME if signature is None else compare(parse(signature), actual(found))


def parameter(owner: str, name: str, default: str) -> Finding:
    """A parameter of a constructor."""
    found = actual(ours(owner))
    return compare({name: default}, {name: found[name]}) if name in found else NOT_THERE


def method(owner: str, name: str, signature: Any) -> Finding:
    """A method of a class: there, only to refuse, or not called."""
    found = getattr(ours(owner), name, None)
    if owner == "Trainer" and name in UNCALLED:
        return uncalled(name, found)
    if found is None:
        return NOT_THERE
    refusal = refusal_of(found)
    if refusal is not None:
        return Finding("refused", refusal)
    return SAME if signature is None or not callable(found) else compare(parse(signature), actual(found))


def uncalled(name: str, found: Any) -> Finding:
    """A method of the Trainer that no run calls, so that overriding it does nothing."""
    if found is None or refusal_of(found) is not None:
        return Finding("refused", f"no run calls it: {UNCALLED[name]}")
    return Finding("different", f"can be called, but no run calls it: {UNCALLED[name]}")


def refusal_of(function: Any) -> str | None:
    """The message of a function that does nothing but raise, else None."""
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    body = [item for item in getattr(node, "body", []) if not is_docstring(item)]
    if len(body) != 1 or not isinstance(body[0], ast.Raise):
        return None
    texts = [item.value for item in ast.walk(body[0]) if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    return " ".join("".join(texts).split())


def is_docstring(node: ast.stmt) -> bool:
    """True if a statement is a bare string."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def member(owner: str, name: str) -> Finding:
    """A property or method, by its name alone."""
    if owner == "Trainer" and name in UNCALLED:
        return uncalled(name, getattr(ours(owner), name, None))
    return SAME if hasattr(ours(owner), name) else NOT_THERE


def attribute(item: Any, name: str) -> Finding:
    """An attribute of an object."""
    return SAME if hasattr(item, name) else NOT_THERE


def field_of(kind: str, name: str) -> Finding:
    """A field of a named tuple or a dataclass."""
    found = ours(kind)
    names = getattr(found, "_fields", None) or list(inspect.signature(found).parameters)
    return SAME if name in names else NOT_THERE


def default_of(owner: str, name: str, default: Any) -> Finding:
    """A field of a dataclass and its default."""
    found = {item.name: item for item in fields(ours(owner))}
    if name not in found:
        return NOT_THERE
    value = found[name].default
    return SAME if normal(value) == normal(default) else Finding("different", f"{value!r} by default")


@functools.cache
def constants() -> str:
    """Every text that stands in the package's code, docstrings left out, one a line."""
    texts = []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {id(item.value) for item in ast.walk(tree) if isinstance(item, ast.stmt) and is_docstring(item)}  # type: ignore[attr-defined]
        texts += [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        ]
    return "\n".join(texts)


def constant(text: str) -> Finding:
    """A text that stands by itself in the package's code, such as the name of an environment variable that it reads."""
    return SAME if text in constants().split("\n") else NOT_THERE


# ---- options, tried

# what an option needs beside it, or a value that its type does not tell
NEEDS: dict[str, dict[str, Any]] = {
    "accelerator_config": {"accelerator_config": {"split_batches": True}},
    "activation_checkpointing_kwargs": {"activation_checkpointing_kwargs": {"use_reentrant": False}},
    "adam_beta1": {"adam_beta1": 0.8},
    "adam_beta2": {"adam_beta2": 0.9},
    "dataloader_multiprocessing_context": {"dataloader_multiprocessing_context": "spawn", "dataloader_num_workers": 1},
    "dataloader_persistent_workers": {"dataloader_persistent_workers": True, "dataloader_num_workers": 1},
    "dataloader_prefetch_factor": {"dataloader_prefetch_factor": 2, "dataloader_num_workers": 1},
    "ddp_backend": {"ddp_backend": "gloo"},
    "debug": {"debug": "underflow_overflow"},
    "deepspeed": {"deepspeed": {"zero_optimization": {"stage": 2}}},
    "enable_jit_checkpoint": {"enable_jit_checkpoint": True, "stop_signals": True},
    "eval_strategy": {"eval_strategy": "epoch"},
    "fsdp": {"fsdp": "full_shard"},
    "fsdp_config": {"fsdp": "full_shard", "fsdp_config": {"reshard_after_forward": True}},
    "generation_config": {"generation_config": {"num_beams": 2}},
    "gradient_checkpointing_kwargs": {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "half_precision_backend": {"half_precision_backend": "amp"},
    "hub_strategy": {"hub_strategy": "end"},
    "include_for_metrics": {"include_for_metrics": ["inputs"]},
    "include_num_input_tokens_seen": {"include_num_input_tokens_seen": "all"},
    "label_names": {"label_names": ["labels"]},
    "label_smoothing_factor": {"label_smoothing_factor": 0.1},
    "liger_kernel_config": {"liger_kernel_config": {"rope": True}},
    "load_best_model_at_end": {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"},
    "log_level": {"log_level": "info"},
    "log_level_replica": {"log_level_replica": "info"},
    "logging_strategy": {"logging_strategy": "epoch"},
    "lr_scheduler_kwargs": {"lr_scheduler_kwargs": {"num_cycles": 2}},
    "lr_scheduler_type": {"lr_scheduler_type": "cosine"},
    "max_steps": {"max_steps": 2},
    "optim": {"optim": "sgd"},
    "optim_args": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "optim_target_modules": {"optim": "galore_adamw", "optim_target_modules": "all-linear"},
    "parallelism_config": {"parallelism_config": {"tp_size": 2}},
    "report_to": {"report_to": "tensorboard"},
    "save_strategy": {"save_strategy": "epoch"},
    "torch_compile_backend": {"torch_compile_backend": "eager"},
    "train_sampling_strategy": {"train_sampling_strategy": "sequential"},
}
PUSH = {"push_to_hub": True, "hub_model_id": "owner/name"}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No log lines, warnings or output while something is tried."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        silence = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def tried(kind: str, given: dict[str, Any]) -> Finding:
    """Constructs arguments from `given`: the same, or refused with the reason."""
    with quiet():
        try:
            ours(kind)(**{"output_dir": "unused", **given})
        except ValueError as error:
            return Finding("refused", told(error))
    return SAME


def told(error: BaseException) -> str:
    """Returns the message of an error in one line."""
    return " ".join(str(error).split())


def another(value: Any) -> Any:
    """A value that differs from a default, of its type; a text where there is none."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return "text"


def trial(kind: str, name: str) -> dict[str, Any]:
    """Keywords that set an option to something other than its default."""
    item = {item.name: item for item in fields(ours(kind))}[name]
    if name in NEEDS:
        return NEEDS[name]
    hint = str(item.type)
    if item.default is None:
        value: Any = True if "bool" in hint else 1 if "int" in hint else 0.5 if "float" in hint else "text"
    else:
        value = another(item.default)
    return {**(PUSH if name.startswith("hub_") and name != "hub_token" else {}), name: value}


def option(kind: str, name: str, default: Any) -> Finding:
    """An option: its default, and whether it can be given another value."""
    found = {item.name: item for item in fields(ours(kind))}
    if name not in found:
        return NOT_THERE
    item = found[name]
    value = item.default_factory() if item.default_factory is not NO_DEFAULT else item.default
    outcome = tried(kind, trial(kind, name))
    if outcome.status != "same":
        return outcome
    return SAME if normal(value) == normal(default) else Finding("different", f"{value!r} by default")


def older_option(name: str) -> Finding:
    """An older name: what it is now, or what to use."""
    if name in (item.name for item in fields(paceline.TrainingArguments)):
        return Finding("same", "an option here")
    entry = OLDER_NAMES.get(name)
    if entry is None:
        return NOT_THERE
    if isinstance(entry, Renamed):
        is_key = entry.new == "accelerator_config"
        now = config_key(entry.new, name, None) if is_key else option("TrainingArguments", entry.new, None)
        if now.status == "refused":
            return Finding("refused", f"now `{entry.new}`: {now.note}")
        return Finding("same", f"works, with one line that says so: now `{entry.new}`")
    if {True, False} <= {item for item in entry.accepted if isinstance(item, bool)}:
        how = "with one line that says so" if entry.expected else "without a word"
        return Finding("different", f"taken {how}, and changes nothing: {entry.remedy}")
    accepted = ", ".join(repr(item) for item in entry.accepted)
    return Finding("refused", f"{entry.remedy}; taken without a word: {accepted}")


def value(kind: str, name: str) -> Finding:
    """A value of an option, or of an enumeration."""
    if kind == "optim":
        return optimizer(name)
    if kind in ("IntervalStrategy", "ParallelMode"):
        return SAME if name in [item.value for item in ours(kind)] else NOT_THERE
    if kind == "lr_scheduler_type":
        return tried("TrainingArguments", {"lr_scheduler_type": name, "eval_strategy": "epoch"})
    if kind == "HPSearchBackend":
        return search_backend(name)
    given: dict[str, dict[str, Any]] = {
        "SaveStrategy": {"save_strategy": name, "eval_strategy": "epoch"},
        "HubStrategy": {**PUSH, "hub_strategy": name},
        "DebugOption": {"debug": name},
        "FSDPOption": {"fsdp": name if name not in ("offload", "auto_wrap") else f"full_shard {name}"},
        "include_for_metrics": {"include_for_metrics": [name]},
    }
    return tried("TrainingArguments", given.get(kind, {kind: name}))


def search_backend(name: str) -> Finding:
    """A value of `backend`."""
    try:
        backends.choose(name)
    except ValueError as error:
        return Finding("refused", str(error))
    return SAME


DEVICES = {"cpu", "cuda", "mps"}  # that paceline drives


def optimizer(name: str) -> Finding:
    """A value of `optim`. A package that is not installed is no refusal: its error names the extra."""
    import torch

    from paceline.pytorch.optim.optimizers import OPTIMIZERS, resolve_optimizer

    devices = OPTIMIZERS[name].devices if name in OPTIMIZERS else frozenset()
    if devices and not devices & DEVICES:
        return Finding("refused", f"needs {', '.join(sorted(devices)).upper()}: {OPTIMIZERS[name].note}")
    targets = {"optim_target_modules": "all-linear"} if name.startswith(("galore", "apollo")) else {}
    with quiet():
        try:
            args = paceline.TrainingArguments(output_dir="unused", optim=name, **targets)
            resolve_optimizer(args, torch.nn.Sequential(torch.nn.Linear(2, 2)))
        except UnsupportedOption as error:
            return Finding("refused", told(error))
        except ValueError as error:
            return Finding("refused", told(error)) if "known" in str(error) else SAME
        except (ImportError, RuntimeError):
            return SAME
    return SAME


FSDP_VALUES: dict[str, Any] = {
    "version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["Layer"],
    "min_num_params": 1000,
    "state_dict_type": "FULL_STATE_DICT",
    "backward_prefetch": "backward_pre",
    "xla_fsdp_settings": {},
}


def fsdp_key(name: str) -> Finding:
    """A key of `fsdp_config`."""
    return tried("TrainingArguments", {"fsdp": "full_shard", "fsdp_config": {name: FSDP_VALUES.get(name, True)}})


def config_key(option_name: str, key: str, default: Any) -> Finding:
    """A key of an option that is a dict."""
    if " " in key:
        return SAME  # a group of keys that torch takes, told in words
    value: Any = {} if key.endswith("_kwargs") else another(default) if default is not None else 2
    if option_name == "accelerator_config" and default is None:
        value = {"num_steps": 2} if key.endswith("_kwargs") else True
    if key == "every_n_layers":
        value = 2
    return tried("TrainingArguments", {option_name: {key: value}})


def reporter(name: str) -> Finding:
    """A value of `report_to`."""
    from paceline.callbacks.reporters import find_reporters

    with quiet():
        try:
            find_reporters(name)
        except UnsupportedOption as error:
            return Finding("refused", told(error))
        except ImportError:
            return SAME
    return SAME


def collator_of_v4(name: str) -> Finding:
    """A collator that v5 dropped, or `return_tensors=tf`."""
    if "=" not in name:
        return export(name, None)
    try:
        paceline.default_data_collator([{"label": 1, "x": [1]}], return_tensors="tf")
    except ImportError:
        return SAME
    except ValueError as error:
        return Finding("refused", told(error))
    return SAME


# ---- a small run: its attributes, keys and files


@dataclass
class Run:
    """The outputs of a small run.

    Attributes:
        trainer: the Trainer.
        keys: of logs and metrics.
        files: names of files, of checkpoints and of the run's folder; and of its folders.
        keywords: that callbacks were given.
    """

    trainer: Any
    keys: set[str]
    files: set[str]
    keywords: set[str]


def small_run() -> Run:
    """Train and evaluate a small module with everything logged, and without a display."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(5, 4), nn.Linear(4, 3)

        def forward(self, input_ids: Any, labels: Any = None) -> Any:
            logits = self.out(self.embed(input_ids).mean(1))
            loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
            return {"loss": loss, "logits": logits}

    keywords: set[str] = set()

    class Listener(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            keywords.update(kwargs)

        on_log = on_step_end = on_train_begin = on_evaluate

    data = [{"input_ids": torch.tensor([i % 5, 1]), "labels": torch.tensor(i % 3)} for i in range(8)]
    with quiet(), tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {
            "eval_strategy": "steps", "eval_steps": 1, "logging_steps": 1, "save_steps": 2, "max_steps": 2,
            "include_num_input_tokens_seen": "all", "use_cpu": True, "report_to": ["tensorboard"],
            "disable_tqdm": True, "output_dir": folder,
        }  # fmt: skip
        try:
            args = paceline.TrainingArguments(**given, skip_memory_metrics=False)
        except UnsupportedOption:
            args = paceline.TrainingArguments(**given)
        trainer = paceline.Trainer(
            Net(), args, train_dataset=data, eval_dataset={"name": data}, callbacks=[Listener()],
            compute_metrics=lambda prediction: {"accuracy": 1.0},
        )  # fmt: skip
        before = torch.get_rng_state()
        first = trainer.evaluate(data)  # the first of all tells more than those after a training
        results = [trainer.train().metrics, {**first, **trainer.evaluate(data)}, trainer.predict(data).metrics]
        for split, metrics in zip(("train", "eval", "test"), results, strict=True):
            trainer.save_metrics(split, metrics)
        trainer.save_state()
        torch.set_rng_state(before)
        keys = {key for row in [*trainer.state.log_history, *results] for key in row}
        return Run(trainer, keys, {path.name for path in Path(folder).rglob("*")}, keywords)


def log_key(name: str, run: Run) -> Finding:
    """A key of logs or metrics; `{prefix}`, `{stage}` and the like stand for what they do there."""
    bare = name.split("(")[0]
    bare = bare.replace("{prefix}", "eval").replace("{stage}", "train").replace("<compute_metrics keys>", "accuracy")
    wanted = bare.replace("{cpu,gpu}", "cpu").replace("{alloc,peaked}", "alloc")
    return SAME if wanted in run.keys else NOT_THERE


def prefix(text: str, run: Run) -> Finding:
    """A prefix of metrics."""
    return SAME if text.replace("{name}", "name") + "_loss" in run.keys else NOT_THERE


def file(name: str, run: Run) -> Finding:
    """A file or folder: written by the small run, or named in the package's code."""
    bare = name.split("(")[0].strip().rstrip("/")
    if bare in run.files or bare in constants().split("\n"):
        return SAME
    pieces = re.split(r"\{[^}]*\}|0000[xy]", bare)
    pattern = ".*".join(re.escape(piece) for piece in pieces)
    if len(pieces) > 1 and any(re.fullmatch(pattern, found) for found in run.files):
        return SAME
    telling = [piece for piece in pieces if len(piece) > 3]
    is_made = len(pieces) > 1 and len(telling) > 0 and all(piece in constants() for piece in telling)
    return SAME if is_made else NOT_THERE


# ---- the TensorFlow side, read and not imported: TensorFlow may be missing


@functools.cache
def tensorflow_definitions() -> dict[str, ast.AST]:
    """Classes and functions of paceline.tensorflow by name, and what stands in the classes by `Class.name`.

    The names that all Trainers share are read with them.
    """
    found: dict[str, ast.AST] = {}
    shared = [PACKAGE / "compat" / "trainer_names.py", PACKAGE / "compat" / "hub_names.py"]
    for path in [*sorted((PACKAGE / "tensorflow").rglob("*.py")), *shared]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name] = node
                for item in node.body:
                    name = getattr(item, "name", None) or getattr(getattr(item, "target", None), "id", None)
                    if name is not None:
                        found[f"{node.name}.{name}"] = item
            elif isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, node)
    return found


def tensorflow(owner: str | None, name: str | None, signature: Any) -> Finding:
    """A name of the TensorFlow side: a class, a member of one or of its bases, or a function."""
    definitions = tensorflow_definitions()
    if not definitions:
        return Finding("refused", LATER_TENSORFLOW)
    node = look_up(owner, name)
    if node is None:
        inherited = name is not None and owner == "TFTrainingArguments" and hasattr(paceline.TrainingArguments, name)
        return SAME if inherited and owner in definitions else NOT_THERE
    if signature is None or not isinstance(node, ast.FunctionDef):
        return SAME
    return compare(parse(signature), parameters_of(node))


def look_up(owner: str | None, name: str | None) -> ast.AST | None:
    """A definition, in a class or in the classes below it."""
    definitions = tensorflow_definitions()
    if owner is None or name is None:
        return definitions.get(owner or name or "")
    pending, seen = [owner], set()
    while pending:
        kind = pending.pop(0)
        node = definitions.get(f"{kind}.{name}")
        if node is not None:
            return node
        base = definitions.get(kind)
        seen.add(kind)
        if isinstance(base, ast.ClassDef):
            pending += [ast.unparse(item).split(".")[-1] for item in base.bases if ast.unparse(item) not in seen]
    return None
