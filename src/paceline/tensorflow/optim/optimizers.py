"""Keras optimizers by the names that `optim` takes, weight decay as in AdamW, and gradient accumulation.

A TFTrainer's own optimizers do not decay biases and the weights of normalisation layers, as on the torch side.
`AdamWeightDecay` and `create_optimizer` skip the names in their lists, as in transformers 4.57.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.optimizer_options import typed_options
from paceline.core.spelling import nearest
from paceline.tensorflow.arguments import OPTIMIZERS, check_optimizer
from paceline.tensorflow.framework import keras, tf
from paceline.tensorflow.optim.schedules import WarmUp

# of a variable itself, the last part of its path
_UNDECAYED_NAME = re.compile(
    r"(^|[_.])bias(:\d+)?$|layer_?norm|rms_?norm|(batch|group)_?norm|(^|[_.])norm([_.:]|$)", re.IGNORECASE
)


class AdamWeightDecay(keras.optimizers.AdamW):  # type: ignore[misc]
    """Adam with decoupled weight decay of all variables except those excluded by name (arXiv:1711.05101).

    Names are full ones, such as `sequential/dense/kernel`, and patterns match any part of them.

    Args:
        learning_rate: a number or a schedule.
        beta_1, beta_2, epsilon, amsgrad: of Adam.
        weight_decay_rate: of the weights that are decayed.
        include_in_weight_decay: patterns of names that are decayed though they are excluded, too.
        exclude_from_weight_decay: patterns of names that are not decayed; None: all are.
        name: of the optimizer.
        kwargs: of Keras' AdamW, such as clipnorm.
    """

    def __init__(
        self,
        learning_rate: object = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        weight_decay_rate: float = 0.0,
        include_in_weight_decay: Sequence[str] | None = None,
        exclude_from_weight_decay: Sequence[str] | None = None,
        name: str = "AdamWeightDecay",
        **kwargs: Any,
    ) -> None:
        kwargs.pop("weight_decay", None)  # in a saved configuration: it is weight_decay_rate
        super().__init__(
            learning_rate=learning_rate,
            weight_decay=weight_decay_rate,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            amsgrad=amsgrad,
            name=name,
            **kwargs,
        )
        self.weight_decay_rate = weight_decay_rate
        self.paths: dict[Any, str] = {}  # variable -> its full name; TensorFlow's own is only the last part of it
        self.included = list(include_in_weight_decay or ())
        self.excluded = list(exclude_from_weight_decay or ())

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the moments, and records the names of the variables."""
        self.paths.update({self._var_key(variable): name_of(variable) for variable in variables})
        super().build(variables)

    def _use_weight_decay(self, variable: object) -> bool:
        name = self.paths.get(self._var_key(variable), name_of(variable))
        if any(re.search(pattern, name) for pattern in self.included):
            return True
        if any(re.search(pattern, name) for pattern in self.excluded):
            return False
        return bool(super()._use_weight_decay(variable))  # arguments of its method exclude_from_weight_decay

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make an equal optimizer."""
        config: dict[str, Any] = super().get_config()
        config.pop("weight_decay", None)
        return {
            **config,
            "weight_decay_rate": self.weight_decay_rate,
            "include_in_weight_decay": self.included,
            "exclude_from_weight_decay": self.excluded,
        }


class GradientAccumulator:
    """Accumulates gradients over calls, per replica, until they are applied and `reset`.

    A TFTrainer accumulates by itself (`gradient_accumulation_steps`); this is for custom loops.
    """

    def __init__(self) -> None:
        self._sums: list[Any] = []
        self._steps: Any = None

    @property
    def step(self) -> Any:
        """Returns the calls since the last reset: an int64 scalar."""
        return self._count().value()

    def _count(self) -> Any:
        """Returns the variable that counts the calls."""
        if self._steps is None:
            self._steps = make_sum(tf.constant(0, tf.int64), aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
        return self._steps

    @property
    def gradients(self) -> list[Any]:
        """Returns the sums on the current replica; None for a variable without a gradient.

        Raises:
            ValueError: nothing was added yet.
        """
        if not self._sums:
            raise ValueError("GradientAccumulator: nothing was added yet; call it with gradients first.")
        return [None if total is None else total.value() for total in self._sums]

    def __call__(self, gradients: Sequence[Any]) -> None:
        """Adds gradients, the same ones in the same order each time.

        Raises:
            ValueError: there are more or fewer of them than before.
        """
        if not self._sums:
            self._count()
            self._sums = [None if item is None else make_sum(tf.zeros_like(item)) for item in gradients]
        if len(gradients) != len(self._sums):
            raise ValueError(f"GradientAccumulator: {len(self._sums)} gradients before, {len(gradients)} now.")
        for total, item in zip(self._sums, gradients, strict=True):
            if total is not None and item is not None:
                total.assign_add(tf.convert_to_tensor(item))
        self._count().assign_add(1)

    def reset(self) -> None:
        """Resets the sums to zero."""
        if not self._sums:
            return
        self._count().assign(0)
        for total in self._sums:
            if total is not None:
                total.assign(tf.zeros(total.shape, total.dtype), read_value=False)  # outside replicas it has none


def make_sum(value: Any, aggregation: object = None) -> Any:
    """Returns a variable of which each replica has its own, never synchronized by itself."""
    with tf.init_scope():
        return tf.Variable(
            lambda: tf.zeros(value.shape, value.dtype),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.NONE if aggregation is None else aggregation,
        )


def create_optimizer(
    init_lr: float,
    num_train_steps: int,
    num_warmup_steps: int,
    min_lr_ratio: float = 0.0,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.999,
    adam_epsilon: float = 1e-8,
    adam_clipnorm: float | None = None,
    adam_global_clipnorm: float | None = None,
    weight_decay_rate: float = 0.0,
    power: float = 1.0,
    include_in_weight_decay: Sequence[str] | None = None,
) -> tuple[Any, Any]:
    """Returns AdamW (Adam without decay) with a linear warm-up and a polynomial decay.

    Not decayed are variables with LayerNorm, layer_norm or bias in their names: a norm that is named otherwise is.

    Args:
        init_lr: the peak rate.
        num_train_steps: optimizer steps of the run.
        num_warmup_steps: those of the warm-up.
        min_lr_ratio: the rate at the end, as a share of the peak.
        adam_clipnorm, adam_global_clipnorm: of each gradient, and of all together; None: not clipped.
        weight_decay_rate: 0 gives Adam.
        power: of the decay.
        include_in_weight_decay: patterns of names that are decayed all the same.

    Returns: the optimizer, and its schedule.
    """
    schedule: Any = keras.optimizers.schedules.PolynomialDecay(
        initial_learning_rate=init_lr,
        decay_steps=max(num_train_steps - num_warmup_steps, 1),
        end_learning_rate=init_lr * min_lr_ratio,
        power=power,
    )
    if num_warmup_steps:
        schedule = WarmUp(init_lr, schedule, num_warmup_steps)
    settings: dict[str, Any] = {
        "learning_rate": schedule,
        "beta_1": adam_beta1,
        "beta_2": adam_beta2,
        "epsilon": adam_epsilon,
        "clipnorm": adam_clipnorm,
        "global_clipnorm": adam_global_clipnorm,
    }
    if weight_decay_rate > 0.0:
        decaying = AdamWeightDecay(
            **settings,
            weight_decay_rate=weight_decay_rate,
            include_in_weight_decay=include_in_weight_decay,
            exclude_from_weight_decay=["LayerNorm", "layer_norm", "bias"],
        )
        return decaying, schedule
    return keras.optimizers.Adam(**settings), schedule


def name_of(variable: Any) -> str:
    """Returns the full name of a variable of Keras or of TensorFlow."""
    return str(getattr(variable, "path", None) or variable.name)


@dataclass(frozen=True)
class OptimizerSettings:
    """The options that describe an optimizer.

    Attributes:
        name: as in `optim`.
        options: as in `optim_args`.
        betas, epsilon: of the Adam family.
        weight_decay: decoupled, as in AdamW.
    """

    name: str
    options: str | Mapping[str, Any] | None
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float


def make_optimizer(described: OptimizerSettings, model: object, learning_rate: object) -> Any:
    """Returns the described optimizer.

    Args:
        described: by the arguments.
        model: its variables decide the exclusions from weight decay.
        learning_rate: a number or a schedule.

    Raises:
        UnsupportedOption: Keras has no such optimizer.
        TypeError: an option that it does not take.
    """
    check_optimizer(described.name)
    kind, is_adam = OPTIMIZERS[described.name]
    settings: dict[str, Any] = {"learning_rate": learning_rate}
    if is_adam:
        settings.update(beta_1=described.betas[0], beta_2=described.betas[1], epsilon=described.epsilon)
    if described.weight_decay:
        settings["weight_decay"] = described.weight_decay
    elif kind in ("AdamW", "ScheduleFreeAdamW"):
        settings["weight_decay"] = 0.0
    make = getattr(keras.optimizers, kind)
    given = typed_options(described.options, make, kind)
    known = {*inspect.signature(make).parameters, *inspect.signature(keras.optimizers.Optimizer).parameters}
    for option in given.keys() - (known - {"kwargs"}):
        raise TypeError(f"optim_args: {kind} of Keras has no option {option!r}; {nearest(option, known - {'kwargs'})}")
    optimizer = make(**settings, **given)
    undecayed = undecayed_variables(model)
    if described.weight_decay and undecayed:
        optimizer.exclude_from_weight_decay(var_list=undecayed)
    return optimizer


def undecayed_variables(model: Any) -> list[Any]:
    """Returns the trainable variables without weight decay: biases, and all of normalisation layers."""
    layers = getattr(model, "_flatten_layers", None)
    found = layers() if callable(layers) else getattr(model, "submodules", ())
    norms = [layer for layer in found if re.search(r"Norm(alization)?$", type(layer).__name__)]
    of_norms = {id(variable) for layer in norms for variable in getattr(layer, "variables", ())}
    return [
        variable
        for variable in model.trainable_variables
        if id(variable) in of_norms or _UNDECAYED_NAME.search(name_of(variable).rpartition("/")[2]) is not None
    ]
