"""Keras optimizers by the names that `optim` takes, weight decay as AdamW has it, and gradients that add up.

A TFTrainer's own optimizers do not decay biases and the weights of normalisation layers, as on the torch side.
`AdamWeightDecay` and `create_optimizer` leave out what their lists name, as in transformers 4.57.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

from paceline.core.optimizer_options import typed_options
from paceline.core.spelling import nearest
from paceline.tf.arguments import OPTIMIZERS, check_optimizer
from paceline.tf.framework import keras, tf
from paceline.tf.schedules import WarmUp

_UNDECAYED_NAME = re.compile(r"bias|layer_?norm|rms_?norm|(batch|group)_?norm|(^|[/_.])norm([/_.]|$)", re.IGNORECASE)


class AdamWeightDecay(keras.optimizers.AdamW):  # type: ignore[misc]
    """Adam with decoupled weight decay of all variables but those that are left out by name (arXiv:1711.05101).

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
        learning_rate: Any = 0.001,
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
        kwargs.pop("weight_decay", None)  # of a saved configuration: it is weight_decay_rate
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
        """Make the moments, and note the names of the variables."""
        self.paths.update({self._var_key(variable): name_of(variable) for variable in variables})
        super().build(variables)

    def _use_weight_decay(self, variable: Any) -> bool:
        name = self.paths.get(self._var_key(variable), name_of(variable))
        if any(re.search(pattern, name) for pattern in self.included):
            return True
        if any(re.search(pattern, name) for pattern in self.excluded):
            return False
        return bool(super()._use_weight_decay(variable))  # what its method exclude_from_weight_decay was told

    def get_config(self) -> dict[str, Any]:
        """The arguments that make an equal optimizer."""
        config: dict[str, Any] = super().get_config()
        config.pop("weight_decay", None)
        return {
            **config,
            "weight_decay_rate": self.weight_decay_rate,
            "include_in_weight_decay": self.included,
            "exclude_from_weight_decay": self.excluded,
        }


class GradientAccumulator:
    """Adds up gradients over calls, each replica its own, until they are applied and `reset`.

    A TFTrainer accumulates by itself (`gradient_accumulation_steps`); this is for loops of one's own.
    """

    def __init__(self) -> None:
        self._sums: list[Any] = []
        self._steps: Any = None

    @property
    def step(self) -> Any:
        """Calls since the last reset: an int64 scalar."""
        return self._count().value()

    def _count(self) -> Any:
        """The variable that counts the calls."""
        if self._steps is None:
            self._steps = make_sum(tf.constant(0, tf.int64), aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
        return self._steps

    @property
    def gradients(self) -> list[Any]:
        """The sums on the current replica; None where there was no gradient.

        Raises:
            ValueError: nothing was added yet.
        """
        if not self._sums:
            raise ValueError("GradientAccumulator: nothing was added yet; call it with gradients first.")
        return [None if total is None else total.value() for total in self._sums]

    def __call__(self, gradients: Sequence[Any]) -> None:
        """Add gradients, the same ones in the same order each time.

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
        """Begin anew from zero."""
        if not self._sums:
            return
        self._count().assign(0)
        for total in self._sums:
            if total is not None:
                total.assign(tf.zeros(total.shape, total.dtype), read_value=False)  # outside replicas it has none


def make_sum(value: Any, aggregation: Any = None) -> Any:
    """A variable of which each replica has its own, never exchanged by itself."""
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
    """AdamW (Adam without decay) under a linear warm-up and a polynomial decay.

    Not decayed are variables with LayerNorm, layer_norm or bias in their names: a norm that is named otherwise is.

    Args:
        init_lr: the peak rate.
        num_train_steps: updates of the run.
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
    """The full name of a variable of Keras or of TensorFlow."""
    return str(getattr(variable, "path", None) or variable.name)


def make_optimizer(args: Any, model: Any, learning_rate: Any) -> Any:
    """The optimizer that the arguments name.

    Args:
        args: `optim`, `optim_args`, `weight_decay` and the Adam options are read.
        model: its variables are looked at for what is not to be decayed.
        learning_rate: a number or a schedule.

    Raises:
        UnsupportedOption: Keras has no such optimizer.
        TypeError: an option that it does not take.
    """
    check_optimizer(args)
    kind, is_adam = OPTIMIZERS[str(args.optim)]
    settings: dict[str, Any] = {"learning_rate": learning_rate}
    if is_adam:
        settings.update(beta_1=args.adam_beta1, beta_2=args.adam_beta2, epsilon=args.adam_epsilon)
    if args.weight_decay:
        settings["weight_decay"] = args.weight_decay
    elif kind in ("AdamW", "ScheduleFreeAdamW"):
        settings["weight_decay"] = 0.0
    make = getattr(keras.optimizers, kind)
    given = typed_options(args.optim_args, make, kind)
    known = {*inspect.signature(make).parameters, *inspect.signature(keras.optimizers.Optimizer).parameters}
    for option in given.keys() - (known - {"kwargs"}):
        raise TypeError(f"optim_args: {kind} of Keras has no option {option!r}; {nearest(option, known - {'kwargs'})}")
    optimizer = make(**settings, **given)
    undecayed = undecayed_variables(model)
    if args.weight_decay and undecayed:
        optimizer.exclude_from_weight_decay(var_list=undecayed)
    return optimizer


def undecayed_variables(model: Any) -> list[Any]:
    """The trainable variables that weight decay leaves alone: biases, and all of normalisation layers."""
    layers = getattr(model, "_flatten_layers", None)
    found = layers() if callable(layers) else getattr(model, "submodules", ())
    norms = [layer for layer in found if re.search(r"Norm(alization)?$", type(layer).__name__)]
    of_norms = {id(variable) for layer in norms for variable in getattr(layer, "variables", ())}
    return [
        variable
        for variable in model.trainable_variables
        if id(variable) in of_norms or _UNDECAYED_NAME.search(name_of(variable)) is not None
    ]
