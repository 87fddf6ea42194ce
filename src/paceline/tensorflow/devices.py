"""The devices of a run: its strategy, according to the arguments, the machine and TF_CONFIG."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from paceline.args.sections import Options
from paceline.tensorflow.framework import tf

logger = logging.getLogger(__name__)

# environment variables that announce a TPU
TPU_VARIABLES = ("TPU_NAME", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "TPU_WORKER_ID")


@dataclass(frozen=True)
class World:
    """The rank of this process and the number of processes.

    Attributes:
        device: the name of the first device that this process computes on.
        n_gpu: number of GPUs that this process drives.
        world_size: number of processes that train together.
        process_index: rank of this process; rank 0 writes files.
        local_process_index: always 0, since a TensorFlow process uses all devices of its machine.
    """

    device: str
    n_gpu: int = 0
    world_size: int = 1
    process_index: int = 0
    local_process_index: int = 0


def current_world(args: Options) -> World:
    """Returns the world that the arguments and TF_CONFIG describe."""
    workers, index = cluster_of(os.environ.get("TF_CONFIG"))
    gpus = [] if args.use_cpu else tf.config.list_logical_devices("GPU")
    return World(
        device=gpus[0].name if gpus else "/device:CPU:0",
        n_gpu=len(gpus),
        world_size=max(workers, 1),
        process_index=index,
    )


def cluster_of(text: str | None) -> tuple[int, int]:
    """Returns (number of workers, index of this one) from the JSON text of TF_CONFIG; (0, 0) if it is empty.

    Raises:
        ValueError: the text is not valid JSON, or its task is neither chief nor worker.
    """
    if not text:
        return 0, 0
    try:
        config = json.loads(text)
        cluster, task = config.get("cluster", {}), config.get("task", {})
        num_chiefs, num_workers = len(cluster.get("chief", ())), len(cluster.get("worker", ()))
        kind, index = task.get("type", "worker"), int(task.get("index", 0))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"TF_CONFIG={text!r:.120} cannot be read: {error}") from error
    if kind not in ("chief", "worker"):
        raise ValueError(f"TF_CONFIG names a task of type {kind!r}: TFTrainer runs on chief and workers only.")
    return num_chiefs + num_workers, index + (num_chiefs if kind == "worker" else 0)


def make_strategy(args: Options) -> Any:
    """Returns the strategy of the arguments.

    Raises:
        ValueError: the named TPU cannot be reached.
    """
    if not args.use_cpu:
        tpu = make_tpu_strategy(args)
        if tpu is not None:
            return tpu
    if cluster_of(os.environ.get("TF_CONFIG"))[0] > 1:
        return the_only("MultiWorkerMirroredStrategy")
    gpus = [] if args.use_cpu else tf.config.list_logical_devices("GPU")
    if len(gpus) > 1:
        return the_only("MirroredStrategy")
    return tf.distribute.OneDeviceStrategy(gpus[0].name if gpus else "/device:CPU:0")


@cache
def the_only(name: str) -> Any:
    """Returns the only strategy of this kind in this process.

    Each strategy numbers its collectives from 100 in a table that all share. Those of a second strategy would be
    mistaken for those of the first, and fail with "Shape mismatch in the collective instance".
    """
    return getattr(tf.distribute, name)()


def make_tpu_strategy(args: Any) -> Any:
    """Returns the strategy of a TPU.

    Returns None if no TPU is named and the environment announces none, or announces one that does not start.

    Raises:
        ValueError: the TPU that `tpu_name` or the variable TPU_NAME names cannot be reached.
    """
    announced = [name for name in TPU_VARIABLES if os.environ.get(name)]
    if args.tpu_name is None and not announced:
        return None
    name = os.environ.get("TPU_NAME") or None if args.tpu_name is None else args.tpu_name
    place = {"zone": args.tpu_zone, "project": args.gcp_project}
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(
            name, **{name: value for name, value in place.items() if value is not None}
        )
        if name not in (None, "local"):
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except Exception as error:  # TensorFlow and Google's client raise a dozen exception types here
        told = f"{type(error).__name__}: {str(error)[:200]}"
        if name is None:
            logger.warning("%s announces a TPU, which does not start: it is left out. %s", announced[0], told)
            return None
        is_option = args.tpu_name is not None
        source, remedy = ("tpu_name", "leave tpu_name out") if is_option else ("TPU_NAME", "unset the variable")
        raise ValueError(
            f"{source}={name!r}: this TPU cannot be reached ({told}). Check its name, tpu_zone and gcp_project, or "
            f"{remedy}."
        ) from error
    return tf.distribute.TPUStrategy(resolver)


def choose_strategy(given: object, model: object, make: Callable[[], Any]) -> Any:
    """Returns the strategy of a run: the given one, else that of the scope in which the model was built, else `make()`.

    `make` may start devices. A model with plain variables on one replica keeps TensorFlow's default strategy.

    Raises:
        TypeError: the given object is not a strategy.
        ValueError: the model was built outside the scope of a strategy of several replicas.
    """
    if given is not None and not isinstance(given, tf.distribute.Strategy):
        raise TypeError(
            f"strategy={given!r} is a {type(given).__name__}; expected an object such as "
            "tf.distribute.MirroredStrategy(), with the model built in its scope. Leave it out for args.strategy."
        )
    built_in = strategy_of(model)
    strategy = built_in if given is None else given
    if strategy is None:
        strategy = make()
    if model is not None and strategy.num_replicas_in_sync > 1 and built_in is not strategy:
        raise ValueError(
            f"The model was not built for {strategy.num_replicas_in_sync} replicas: make it inside "
            "`with strategy.scope():` (args.strategy, or the one you hand over), or pass model_init."
        )
    if model is not None and built_in is None:
        return tf.distribute.get_strategy()  # plain variables stay on their device
    return strategy


def strategy_of(model: object) -> Any:
    """Returns the strategy in whose scope a model's variables were created; None for plain variables."""
    for variable in getattr(model, "variables", ()):
        plain = getattr(variable, "value", variable)
        found = getattr(plain if not callable(plain) else variable, "_distribute_strategy", None)
        if found is not None and type(found).__name__ != "_DefaultDistributionStrategy":
            return found
    return None
