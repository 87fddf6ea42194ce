"""Keras optimizers by the names that `optim` takes, weight decay as in AdamW, and gradient accumulation.

A TFTrainer's own optimizers do not decay biases and the weights of normalization layers, as on the torch side.
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

# matches the last part of a variable's path
_UNDECAYED_NAME = re.compile(
    r"(^|[_.])bias(:\d+)?$|layer_?norm|rms_?norm|(batch|group)_?norm|(^|[_.])norm([_.:]|$)", re.IGNORECASE
)


class AdamWeightDecay(keras.optimizers.AdamW):  # type: ignore[misc]
    """Adam with decoupled weight decay of all variables except those excluded by name (arXiv:1711.05101).

    Patterns are searched in full names such as `sequential/dense/kernel`.

    Args:
        learning_rate: a number or a schedule.
        beta_1, beta_2, epsilon, amsgrad: Adam's settings.
        weight_decay_rate: rate for the weights that are decayed.
        include_in_weight_decay: patterns of names that are decayed even if they are also excluded.
        exclude_from_weight_decay: patterns of names that are not decayed; None excludes none.
        name: name of the optimizer.
        kwargs: further arguments of Keras' AdamW, such as clipnorm.
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
        kwargs.pop("weight_decay", None)  # of a saved configuration, where weight_decay_rate has the same value
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
        self.paths: dict[Any, str] = {}  # variable -> full name; TensorFlow's own name is only the last part
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
        return bool(super()._use_weight_decay(variable))  # respects Keras' method exclude_from_weight_decay

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor arguments of an equal optimizer."""
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

    This class is for custom loops; a TFTrainer accumulates itself (`gradient_accumulation_steps`).
    """

    def __init__(self) -> None:
        self._sums: list[Any] = []
        self._steps: Any = None

    @property
    def step(self) -> Any:
        """Returns the number of calls since the last reset, an int64 scalar."""
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
            ValueError: no gradients were added yet.
        """
        if not self._sums:
            raise ValueError("GradientAccumulator: nothing was added yet; call it with gradients first.")
        return [None if total is None else total.value() for total in self._sums]

    def __call__(self, gradients: Sequence[Any]) -> None:
        """Adds gradients, which must be of the same variables in the same order in each call.

        Raises:
            ValueError: the number of gradients differs from before.
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
                total.assign(tf.zeros(total.shape, total.dtype), read_value=False)  # no value exists outside replicas


def make_sum(value: Any, aggregation: object = None) -> Any:
    """Returns a variable of zeros that each replica holds separately, and that is never synchronized automatically."""
    with tf.init_scope():
        return tf.Variable(
            lambda: tf.zeros(value.shape, value.dtype),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.NONE if aggregation is None else aggregation,
        )


def own_part(value: Any, variable: Any, has_loss_scale: bool) -> Any:
    """Returns this replica's part of a gradient that is the same on all replicas; Keras adds up the parts.

    It is the whole on the first replica, and 0 on the others, since Keras clips (`clipnorm`, `global_clipnorm`,
    `clipvalue`) before it adds up.

    Args:
        value: the gradient, a dense tensor.
        variable: the variable of the gradient.
        has_loss_scale: the optimizer scales the loss. Each worker then looks at its own part to decide if the step is
            applied, so that what is not finite is in each.
    """
    context = tf.distribute.get_replica_context()
    if getattr(variable, "overwrite_with_gradient", False):  # a scale of float8, which each replica assigns
        return value / context.num_replicas_in_sync
    is_kept = tf.equal(context.replica_id_in_sync_group, 0)
    if has_loss_scale:
        is_kept |= ~tf.math.is_finite(value)
    return tf.where(is_kept, value, tf.zeros_like(value))


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
    """Returns AdamW (Adam without weight decay) with a linear warm-up and a polynomial decay of the rate.

    Variables with LayerNorm, layer_norm or bias in their names have no weight decay; norms with other names have it.

    Args:
        init_lr: the peak rate.
        num_train_steps: optimizer steps of the run.
        num_warmup_steps: optimizer steps of the warm-up.
        min_lr_ratio: the final rate, as a share of the peak.
        adam_beta1, adam_beta2, adam_epsilon: Adam's settings.
        adam_clipnorm, adam_global_clipnorm: maximum norm of each gradient, and of all together; None disables it.
        weight_decay_rate: 0 gives Adam.
        power: exponent of the polynomial decay.
        include_in_weight_decay: patterns of names that are decayed in any case.

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
    """Returns the full name of a Keras or TensorFlow variable."""
    return str(getattr(variable, "path", None) or variable.name)


@dataclass(frozen=True)
class OptimizerSettings:
    """The options that describe an optimizer.

    Attributes:
        name: as in `optim`.
        options: as in `optim_args`.
        betas, epsilon: settings of the Adam family.
        weight_decay: decoupled weight decay, as in AdamW.
    """

    name: str
    options: str | Mapping[str, Any] | None
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float


def make_optimizer(described: OptimizerSettings, model: object, learning_rate: object) -> Any:
    """Returns the described optimizer.

    Args:
        described: the settings.
        model: its biases and normalization weights are excluded from weight decay.
        learning_rate: a number or a schedule.

    Raises:
        UnsupportedOption: Keras has no such optimizer.
        TypeError: the optimizer does not take an option.
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
    """Returns the trainable variables without weight decay: biases, and all variables of normalization layers."""
    layers = getattr(model, "_flatten_layers", None)
    found = layers() if callable(layers) else getattr(model, "submodules", ())
    norms = [layer for layer in found if re.search(r"Norm(alization)?$", type(layer).__name__)]
    of_norms = {id(variable) for layer in norms for variable in getattr(layer, "variables", ())}
    return [
        variable
        for variable in model.trainable_variables
        if id(variable) in of_norms or _UNDECAYED_NAME.search(name_of(variable).rpartition("/")[2]) is not None
    ]
