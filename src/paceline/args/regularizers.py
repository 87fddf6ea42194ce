"""Regularizers of a run: their settings, the order of their passes, and the rules between them.

The settings are plain values; `implementation` is the location of the pass that does the work, imported by a run only.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, ClassVar

from paceline.args.errors import UnsupportedOption, did_you_mean, parse_json, wrong_value
from paceline.args.packing import JOINING, packing_of, tokens_of
from paceline.args.registry import REGULARIZERS
from paceline.args.sections import Options
from paceline.args.sharding import is_xla_asked

BATCH, INPUTS, LOSS, GRADIENT = "batch", "inputs", "loss", "gradient"
STAGES = (BATCH, INPUTS, LOSS, GRADIENT)  # in the order in which an optimizer step passes them


class Regularizer:
    """Settings of a regularizer, an entry of `regularizers`. Subclasses are dataclasses with a default for each field.

    Attributes:
        name: its name in YAML files and messages.
        stage: one of `STAGES`.
        implementation: a class, or its location `package.module:name`, that is called with (settings, context) when a
            run starts, and returns a `paceline.pytorch.regularizers.passes.RegularizerPass`.
        excludes: names of regularizers and options that this one cannot be combined with, with the reason.
        order: the order of training samples that it needs, a name in `paceline.args.registry.ORDERS`; empty for any.
    """

    name: ClassVar[str] = ""
    stage: ClassVar[str] = BATCH
    implementation: ClassVar[Any] = ""
    excludes: ClassVar[Mapping[str, str]] = {}

    @property
    def order(self) -> str:
        """Returns the order of training samples that it needs."""
        return ""

    def check(self) -> None:
        """Raises ValueError if a setting is invalid."""

    def describe(self) -> str:
        """Returns the name and the settings that differ from their defaults, as `mixup(alpha=0.4)`."""
        changed = ", ".join(f"{key}={value!r}" for key, value in self.changed().items())
        return f"{self.name}({changed})" if changed else self.name

    def changed(self) -> dict[str, Any]:
        """Returns the settings that differ from their defaults."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, (value, default) in values.items() if default is MISSING or value != default}

    def to_dict(self) -> dict[str, Any]:
        """Returns the entry as a YAML file holds it: `{name: {setting: value}}`."""
        known = REGULARIZERS.get(self.name)
        own = f"{type(self).__module__}:{type(self).__qualname__}"
        return {(self.name if known == own else own): self.changed()}


def refuse(settings: Regularizer, name: str, expected: str) -> ValueError:
    """Returns the error for an invalid setting of a regularizer."""
    return wrong_value(f"regularizers: {settings.name}({name})", getattr(settings, name), expected)


def is_number(value: object, low: float, is_open: bool = True) -> bool:
    """Returns True if a value is a finite number above `low`, or equal to it if not `is_open`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return value > low or (not is_open and value == low)


@dataclass(frozen=True)
class Mixup(Regularizer):
    """Trains on weighted means of two samples and of their losses (Zhang et al., 2018, arXiv:1710.09412).

    Args:
        alpha: the weight of a micro-batch is drawn from Beta(alpha, alpha).
        on: "inputs" mixes the floating-point inputs; "embeddings" mixes the output of the model's input embedding, for
            token ids (Guo et al., 2019, arXiv:1905.08941).
    """

    alpha: float = 0.2
    on: str = "inputs"

    name: ClassVar[str] = "mixup"
    implementation: ClassVar[str] = "paceline.pytorch.regularizers.mixing:Mixing"
    excludes: ClassVar[Mapping[str, str]] = {
        "linear_cross_entropy": "it computes a loss without logits, and mixing needs a second loss from them",
        "packing": "samples of a row are mixed with those of another row, whose documents end elsewhere",
    }

    def check(self) -> None:
        """Raises ValueError if a setting is invalid."""
        if not is_number(self.alpha, 0):
            raise refuse(self, "alpha", "expected a number above 0")
        if self.on not in ("inputs", "embeddings"):
            raise refuse(self, "on", "choose 'inputs' or 'embeddings'")


@dataclass(frozen=True)
class CutMix(Regularizer):
    """Pastes a box of one image into another, and weighs their losses by area (Yun et al., 2019, arXiv:1905.04899).

    Args:
        alpha: the area that an image keeps is drawn from Beta(alpha, alpha).
    """

    alpha: float = 1.0

    name: ClassVar[str] = "cutmix"
    implementation: ClassVar[str] = "paceline.pytorch.regularizers.mixing:Mixing"
    excludes: ClassVar[Mapping[str, str]] = Mixup.excludes

    def check(self) -> None:
        """Raises ValueError if a setting is invalid."""
        if not is_number(self.alpha, 0):
            raise refuse(self, "alpha", "expected a number above 0")


WHOLE_GRADIENT = "it needs all gradients of an optimizer step before the step"
SCALED = "gradients are scaled there, and may overflow; set bf16=True instead"


@dataclass(frozen=True)
class SAM(Regularizer):
    """Steps along the gradient at the worst weights nearby (Foret et al., 2021, arXiv:2010.01412).

    Args:
        rho: distance of those weights, as a 2-norm over all parameters.
        adaptive: measure the distance relative to the weights (ASAM; Kwon et al., 2021, arXiv:2102.11600, who use a
            rho of 0.5).
        eta: with `adaptive`, is added to the absolute value of each weight.
    """

    rho: float = 0.05
    adaptive: bool = False
    eta: float = 0.01

    name: ClassVar[str] = "sam"
    stage: ClassVar[str] = GRADIENT
    implementation: ClassVar[str] = "paceline.pytorch.regularizers.sharpness:SharpnessAware"
    excludes: ClassVar[Mapping[str, str]] = {
        "optimizer_in_backward": WHOLE_GRADIENT,
        "deepspeed": "DeepSpeed keeps gradients and weights by its own rules",
        "fp16": SCALED,
        "gradient_noise_scale": "it measures the gradient of a window, and there are two in a step",
    }

    def check(self) -> None:
        """Raises ValueError if a setting is invalid."""
        if not is_number(self.rho, 0):
            raise refuse(self, "rho", "expected a number above 0")
        if not isinstance(self.adaptive, bool):
            raise refuse(self, "adaptive", "expected true or false")
        if not is_number(self.eta, 0, is_open=False):
            raise refuse(self, "eta", "expected a number of at least 0")


COUPLES = "it mixes samples, whose gradients are to be clipped one by one"


@dataclass(frozen=True)
class DPSGD(Regularizer):
    """Trains with differential privacy (Abadi et al., 2016, arXiv:1607.00133), by Opacus.

    Args:
        max_grad_norm: norm that the gradient of each sample is clipped to.
        noise_multiplier: standard deviation of the noise on the sum of these gradients, in units of that norm.
        target_epsilon: the noise multiplier is the one that spends this epsilon in the whole run; instead of
            `noise_multiplier`.
        delta: probability that epsilon is exceeded; well below 1 / number of samples.
        accountant: "rdp" or "prv" (a tighter bound, slower).
        sampling: "poisson": each step takes each sample with the same probability, independently of all others, so
            that epsilon counts on privacy amplification by sampling; the size of batches varies. "shuffle": each sample
            is used once per epoch, in the order of `train_sampling_strategy`, and epsilon counts on nothing else; more
            noise for the same `target_epsilon`.
        noise_seed: seed of the noise and of Poisson sampling, for tests. Unset: drawn from the operating system, and
            kept in checkpoints.
    """

    max_grad_norm: float = 1.0
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    delta: float | None = None
    accountant: str = "rdp"
    sampling: str = "poisson"
    noise_seed: int | None = None

    name: ClassVar[str] = "dp_sgd"
    stage: ClassVar[str] = GRADIENT
    implementation: ClassVar[str] = "paceline.pytorch.regularizers.privacy:PrivateGradients"
    excludes: ClassVar[Mapping[str, str]] = {
        "mixup": COUPLES,
        "cutmix": COUPLES,
        "sam": "it uses the gradient twice, and one of them would not be private",
        "packing": "a row holds several samples, whose gradients cannot be told apart",
        "optimizer_in_backward": WHOLE_GRADIENT,
        "deepspeed": "gradients of single samples are computed by hooks of one process",
        "fp16": SCALED,
        "gradient_noise_scale": "it would reveal gradients without noise",
        "linear_cross_entropy": "the head is computed without its module, whose hooks give gradients of single samples",
        "torch_compile": "gradients of single samples are computed by hooks, which compiled code leaves out",
        "activation_checkpointing": "the forward pass is run twice, and hooks count it as two",
        "auto_find_batch_size": "a pass that runs out of memory is repeated, and may count twice",
        "ignore_data_skip": "a sample may then be used twice in an epoch",
        "rollback": "steps that are undone have spent privacy too",
        "phases": "modules that a later phase trains would have no gradients of single samples",
    }

    @property
    def order(self) -> str:
        """Returns the order of training samples that it needs."""
        return "poisson" if self.sampling == "poisson" else ""

    def check(self) -> None:
        """Raises ValueError if a setting is invalid."""
        if not is_number(self.max_grad_norm, 0):
            raise refuse(self, "max_grad_norm", "expected a number above 0")
        given = [name for name in ("noise_multiplier", "target_epsilon") if getattr(self, name) is not None]
        if len(given) != 1:
            raise refuse(self, "noise_multiplier", "give either noise_multiplier or target_epsilon")
        if not is_number(getattr(self, given[0]), 0):
            raise refuse(self, given[0], "expected a number above 0")
        if not is_number(self.delta, 0) or self.delta is None or self.delta >= 1:
            raise refuse(self, "delta", "expected a probability well below 1 / number of samples, such as 1e-5")
        if self.accountant not in ("rdp", "prv"):
            raise refuse(self, "accountant", "choose 'rdp' or 'prv'")
        if self.sampling not in ("poisson", "shuffle"):
            raise refuse(self, "sampling", "choose 'poisson' or 'shuffle'")
        if self.noise_seed is not None and (isinstance(self.noise_seed, bool) or not isinstance(self.noise_seed, int)):
            raise refuse(self, "noise_seed", "expected a whole number")


# ---- reading the option


def keep_regularizers(name: str, value: object) -> list[Regularizer] | None:
    """Converts a list of settings, names and `{name: settings}`, or JSON of it, to a list of settings; None if empty.

    Raises:
        ValueError: an entry is unknown or invalid.
    """
    if isinstance(value, str):
        text = value.strip()
        value = parse_json(name, text) if text[:1] in ("[", "{") else [word for word in text.split(",") if word.strip()]
    if isinstance(value, Mapping):
        value = [{key: settings} for key, settings in value.items()]
    if isinstance(value, Regularizer):
        value = [value]
    if not isinstance(value, list | tuple):
        raise wrong_value(name, value, "expected a list of regularizers, such as [mixup, sam: {rho: 0.05}]")
    return [read_entry(name, entry) for entry in value] or None


def read_entry(option: str, entry: object) -> Regularizer:
    """Returns the settings of one entry of `regularizers`."""
    if isinstance(entry, type) and issubclass(entry, Regularizer):
        entry = entry()
    if isinstance(entry, Regularizer):
        return checked(option, entry)
    if isinstance(entry, str):
        entry = {entry.strip(): None}
    if not isinstance(entry, Mapping) or len(entry) != 1:
        raise wrong_value(option, entry, "an entry is a name, or one name with its settings: {sam: {rho: 0.05}}")
    name, settings = next(iter(entry.items()))
    kind = find_kind(option, str(name))
    if not isinstance(settings, Mapping | None):
        raise wrong_value(option, entry, f"expected the settings of {name} by name: {{{name}: {{setting: value}}}}")
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for key in settings or {}:
        if key not in known:
            hint = did_you_mean(str(key), known) or f"; it has {', '.join(known)}"
            raise wrong_value(option, entry, f"{name} has no setting {key!r}", hint)
    return checked(option, kind(**{key: as_number(item) for key, item in (settings or {}).items()}))


def checked(option: str, settings: Regularizer) -> Regularizer:
    """Returns settings after their own check. Raises: ValueError."""
    if not is_dataclass(settings) or not settings.name or settings.stage not in STAGES:
        raise wrong_value(
            option, settings, f"a Regularizer is a dataclass with a name and a stage of {', '.join(STAGES)}"
        )
    settings.check()
    return settings


def as_number(value: object) -> Any:
    """Returns text that is a number, such as YAML's 1e-5, as a number; any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def find_kind(option: str, name: str) -> type[Regularizer]:
    """Returns the class of settings by a name of the registry, or by a location `package.module:name`.

    Raises:
        ValueError: there is none.
    """
    location = REGULARIZERS.get(name, name if ":" in name else "")
    if not location:
        hint = did_you_mean(name, REGULARIZERS) or f"; known are {', '.join(REGULARIZERS)}"
        raise wrong_value(option, name, "it is no regularizer", hint)
    module, _, attribute = location.partition(":")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise wrong_value(option, name, f"it could not be imported ({error})") from error
    if not (isinstance(kind, type) and issubclass(kind, Regularizer)):
        raise wrong_value(option, name, "it is no subclass of paceline.Regularizer")
    return kind


# ---- order and conflicts


def regularizers_of(options: Options) -> tuple[Regularizer, ...]:
    """Returns the regularizers in the order of their stages, and as given within a stage; empty without the option."""
    given = getattr(options, "regularizers", None) or ()
    return tuple(sorted(given, key=lambda each: STAGES.index(each.stage)))


def describe_order(options: Options) -> str:
    """Returns the passes of an optimizer step in their order, those of other options included; empty without any."""
    passes = regularizers_of(options)
    entries = [(each.stage, each.describe()) for each in passes]
    if entries and options.neftune_noise_alpha:
        entries.append((INPUTS, f"neftune(alpha={options.neftune_noise_alpha:g})"))
    if entries and options.label_smoothing_factor:
        entries.append((LOSS, f"label smoothing({options.label_smoothing_factor:g})"))
    by_stage = {stage: [text for own, text in entries if own == stage] for stage in STAGES}
    return " -> ".join(f"{stage}: {', '.join(texts)}" for stage, texts in by_stage.items() if texts)


def is_set(options: Options, name: str) -> bool:
    """Returns True if an option has an effect that a regularizer can exclude."""
    if name == "xla":
        return is_xla_asked(options.parallel, options.fsdp, options.fsdp_config)
    if name == "rollback":
        return str(options.nonfinite_policy) == "rollback"
    if name == "packing":
        return packing_of(options) in JOINING
    if name == "linear_cross_entropy":
        return options.linear_cross_entropy not in (False, "auto")  # "auto" computes the logits
    return getattr(options, name, None) not in (None, False, 0, "", {}, [])


def shown_option(options: Options, name: str) -> str:
    """Returns an option that a regularizer excludes, with its value."""
    return "nonfinite_policy='rollback'" if name == "rollback" else f"{name}={getattr(options, name, True)!r}"


def check_regularizers(options: Options) -> None:
    """Checks that no two regularizers, and no regularizer and another option, contradict each other.

    Raises:
        ValueError: a regularizer is given twice.
        UnsupportedOption: two cannot be combined; the message names both.
    """
    passes = regularizers_of(options)
    names = [each.name for each in passes]
    for each in passes:
        if names.count(each.name) > 1:
            raise ValueError(f"regularizers: {each.name} is given {names.count(each.name)} times: leave one of them.")
        for other, reason in each.excludes.items():
            if other in names or (other not in REGULARIZERS and is_set(options, other)):
                shown = other if other in names else shown_option(options, other)
                raise UnsupportedOption(f"regularizers: {each.name} and {shown} exclude each other: {reason}.")
        check_order(each, options)


def check_order(settings: Regularizer, options: Options) -> None:
    """Checks that no option determines another order of the samples than a regularizer needs.

    Raises:
        UnsupportedOption: one does; the message names both.
    """
    if not settings.order:
        return
    for name, is_free in (
        ("train_sampling_strategy", str(options.train_sampling_strategy) == "random"),
        ("packing", packing_of(options) is None),
        ("per_device_train_tokens", tokens_of(options) is None),
        ("batch_size_warmup", not options.batch_size_warmup),
    ):
        if not is_free:
            shown = shown_option(options, name)
            raise UnsupportedOption(
                f"regularizers: {settings.name} and {shown} exclude each other: it draws the samples of each step by "
                f"itself ({settings.order} sampling)."
            )


def order_notes(options: Options) -> list[str]:
    """Returns the note of a plan on the order of the regularizers; empty without any."""
    order = describe_order(options)
    return [f"regularizers: {order}."] if order else []
