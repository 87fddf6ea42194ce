"""Construction of an arguments object: older names are translated, unknown ones refused with the closest match."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.args.accelerator_config import AcceleratorConfig
from paceline.args.choices import IntervalStrategy, SchedulerType
from paceline.args.errors import did_you_mean
from paceline.args.metric_names import is_maximized, seems_higher_better, seems_lower_better
from paceline.args.older_names import OLDER_NAMES, Retired, retired_values, translate
from paceline.args.places import BASE, is_url, staging_folder
from paceline.args.redeclared import is_redeclared
from paceline.args.sections import Options

Made = TypeVar("Made")

# attributes of an object under construction
GIVEN = "_given_by_name"  # the keywords that the caller passed
TOLD = "_told"  # the warnings that were given for the object that this one is a copy of; None if it is no copy


@functools.cache
def parameters_of(initializer: Any) -> tuple[frozenset[str], bool]:
    """Returns the keywords of an `__init__`, and True if it accepts any keyword."""
    parameters = inspect.signature(initializer).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return frozenset(parameter.name for parameter in parameters), takes_any


def defaults_of(cls: type) -> dict[str, Any]:
    """Returns the fields of an arguments class with their defaults."""
    defaults: dict[str, Any] = {}
    for item in fields(cls) if is_dataclass(cls) else ():
        if item.init:
            default = item.default_factory() if item.default_factory is not MISSING else item.default
            defaults[item.name] = None if default is MISSING else default
    return defaults


def checked_keywords(cls: Any, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the keywords `given` under their names in `cls`, and the retired options among them.

    Raises:
        TypeError: a name is unknown; the message contains the closest known one.
        UnsupportedOption: a retired option has a value with an effect.
    """
    names, takes_any = parameters_of(cls.__init__)
    if names.issuperset(given):
        return given, {}
    known = {**dict.fromkeys(names), **defaults_of(cls)}
    retired = retired_values(given, known)
    result = translate(given, known, cls.__name__)
    unknown = [] if takes_any else [name for name in result if name not in names]
    if unknown:
        hint = did_you_mean(unknown[0], [*known, *OLDER_NAMES])
        raise TypeError(
            f"{cls.__name__}.__init__() got an unexpected keyword argument {unknown[0]!r}: no such option{hint}"
        )
    return result, retired


def replaced_object(cls: type, caller: FrameType) -> Any:
    """Returns the object that `dataclasses.replace` copies if it is the caller; None for any other call.

    `replace` passes every field; a comparison with the object shows which fields were changed. Before 3.13, Python
    calls no method of the class that would report this.
    """
    if caller.f_globals.get("__name__") != "dataclasses":
        return None
    source = caller.f_locals.get("obj", caller.f_locals.get("self"))
    return source if type(source) is cls else None


def names_written(source: Any, given: dict[str, Any]) -> set[str]:
    """Returns the options that a `dataclasses.replace` of `source` sets explicitly.

    These are the changed fields, and the current names of unchanged fields under older names. If a field under an older
    name is changed, the option that was derived from it is removed from `given`.
    """
    held = vars(source)
    changed = {name for name, value in given.items() if name not in held or held[name] is not value}
    written = set(changed)
    for name, entry in OLDER_NAMES.items():
        if isinstance(entry, Retired) or entry.new in changed:
            continue
        if name in changed:
            given.pop(entry.new, None)
        elif name in given:
            written.add(entry.new)
    return written


def underived(source: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the keywords of a `dataclasses.replace` with the user's values where `source` holds derived ones.

    The copy derives them anew: `replace(args, metric_for_best_model="accuracy")` has the direction of accuracy, not
    that of the metric before.
    """
    held = vars(source)
    own = {name: value for name, value in held.get("_given", {}).items() if given.get(name) is held[name]}
    return {**given, **own}


def option_docs() -> Any:
    """Returns the module that documents options; few programs read what it writes."""
    return importlib.import_module("paceline.args.option_docs")


class ArgumentsMeta(type):
    """Checks the keywords of a call before any `__init__`, including a subclass's."""

    if not TYPE_CHECKING:  # Type checkers read the signature of __init__.

        def __call__(cls, *values: Any, **given: Any) -> Any:
            source = replaced_object(cls, sys._getframe(1))
            written = given.keys() if source is None else names_written(source, given)
            if source is not None:
                given = underived(source, given)
            keywords, retired = checked_keywords(cls, given)
            made = cls.__new__(cls, *values, **keywords)
            vars(made)[GIVEN] = frozenset(keywords if source is None else written)
            vars(made)[TOLD] = None if source is None else vars(source).get(TOLD, frozenset())
            made.__init__(*values, **keywords)
            if source is not None and BASE in vars(source):
                vars(made)[BASE] = vars(source)[BASE]
            vars(made).pop(GIVEN, None)
            vars(made).update(retired)
            return made

        @property
        def __doc__(cls) -> str:
            """The docstring as written, followed by the text of each option; built when it is read."""
            own = type.__dict__["__doc__"].__get__(cls, type(cls)) or ""
            # @dataclass reads the docstring between setting these two; the text of all options takes 6 ms
            is_being_made = "__dataclass_params__" in vars(cls) and "__match_args__" not in vars(cls)
            return option_docs().class_doc(cls, own) if is_dataclass(cls) and not is_being_made else own

        @__doc__.setter
        def __doc__(cls, text: str) -> None:
            type.__dict__["__doc__"].__set__(cls, text)

        @property
        def __signature__(cls) -> inspect.Signature:
            """The signature of `__init__`, which the `__call__` above would hide."""
            signature = inspect.signature(cls.__init__)
            return signature.replace(parameters=list(signature.parameters.values())[1:])


# Options that `derived_values` sets, but those of a store: each comes before the ones that it follows from.
DERIVED = (
    "do_eval",
    "eval_steps",
    "greater_is_better",
    "metric_for_best_model",
    "torch_compile_backend",
    "torch_compile",
    "gradient_accumulation_steps",
    "dataloader_pin_memory",
)


def derived_values(options: Options) -> dict[str, Any]:
    """Returns the values of unset options that follow from other options; scripts and callbacks read them."""
    values: dict[str, Any] = {}
    if options.eval_strategy != IntervalStrategy.NO:
        values["do_eval"] = True
        if options.eval_strategy == IntervalStrategy.STEPS and not options.eval_steps:
            values["eval_steps"] = options.logging_steps
    needs_metric = options.load_best_model_at_end or options.lr_scheduler_type in (
        SchedulerType.REDUCE_ON_PLATEAU,
        SchedulerType.GREEDY,
    )
    metric = options.metric_for_best_model or ("loss" if needs_metric else None)
    if metric is not None:
        values["metric_for_best_model"] = metric
        if options.greater_is_better is None:
            values["greater_is_better"] = is_maximized(metric)
    if any((options.torch_compile, options.torch_compile_mode, options.torch_compile_backend)):
        values["torch_compile"] = True
        values["torch_compile_backend"] = options.torch_compile_backend or "inductor"
    config = options.accelerator_config
    if isinstance(config, AcceleratorConfig) and config.num_steps and options.gradient_accumulation_steps == 1:
        values["gradient_accumulation_steps"] = config.num_steps
    if is_url(options.output_dir):
        values.update(derived_store(options))
    if options.use_cpu:
        values["dataloader_pin_memory"] = False
    return values


def surprises(given: Mapping[str, Any], options: Options) -> list[str]:
    """Returns warnings about values that are accepted and do something else than they seem to.

    Args:
        given: values that `derived_values` replaced, by option.
        options: the arguments with the derived values.
    """
    notes = direction_notes(given, options)
    if options.eval_steps and options.eval_strategy != IntervalStrategy.STEPS:
        strategy = str(getattr(options.eval_strategy, "value", options.eval_strategy))
        notes.append(
            f"eval_steps={options.eval_steps} has no effect with eval_strategy={strategy!r}: "
            "set eval_strategy='steps', or leave eval_steps out."
        )
    elif given.get("eval_steps") == 0:
        notes.append(
            "eval_steps=0 with eval_strategy='steps': evaluations are made every "
            f"logging_steps={options.logging_steps} steps, as if eval_steps were not given; eval_strategy='no' turns "
            "them off."
        )
    return notes


def direction_notes(given: Mapping[str, Any], options: Options) -> list[str]:
    """Returns a warning if `greater_is_better` contradicts the name of the metric.

    It does by default for errors, and where the metric of a dict was replaced.
    """
    metric, is_greater = options.metric_for_best_model, options.greater_is_better
    if metric is None or is_greater is None:
        return []
    if "greater_is_better" in given:  # not given, but derived
        if not seems_lower_better(metric):
            return []
        return [
            f"metric_for_best_model={metric!r}: the model with the highest value counts as the best, since the name "
            "does not end in 'loss'. Set greater_is_better=False if smaller values are better, or True if not."
        ]
    is_wrong = not is_maximized(metric) if is_greater else seems_higher_better(metric)
    if not is_wrong:
        return []
    return [
        f"greater_is_better={is_greater} with metric_for_best_model={metric!r}: the model with the "
        f"{'highest' if is_greater else 'lowest'} value counts as the best. Leave greater_is_better out if that is not "
        "meant: it then follows from the metric."
    ]


def derived_store(options: Options) -> dict[str, Any]:
    """Returns the store that an `output_dir` with a URL names, and the local folder that is uploaded to it.

    Raises:
        ValueError: `output_store` names another store.
    """
    if is_redeclared(type(options), "output_store"):
        raise ValueError(
            f"output_dir={options.output_dir!r} is a URL, which becomes output_store, and {type(options).__name__} "
            "declares output_store itself: let output_dir be a folder of this machine."
        )
    if options.output_store not in (None, options.output_dir):
        raise ValueError(
            f"output_dir={options.output_dir!r} and output_store={options.output_store!r} are two stores: let "
            "output_dir be a folder of this machine, or leave output_store out."
        )
    return {"output_store": options.output_dir, "output_dir": staging_folder(str(options.output_dir))}


def forget_derived(options: Made, values: Mapping[str, Any]) -> Made:
    """Returns arguments without the options that follow from others, if `values`, which they were read from, hold all.

    They are derived anew when the others are assigned. `to_dict` returns all, and a user's own file does not. Values
    that do not follow are kept.
    """
    if not values.keys() >= set(DERIVED):
        return options
    made: Any = options
    defaults = defaults_of(type(options))
    for name in DERIVED:
        held = getattr(made, name)
        vars(options)[name] = defaults[name]
        if derived_values(made).get(name, defaults[name]) != held:
            vars(options)[name] = held
    made._derive()
    return options
