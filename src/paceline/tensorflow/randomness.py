"""Random state: seeding, the TensorFlow generators in a checkpoint, and the generators of Python and numpy."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from paceline.core.optional import require
from paceline.tensorflow.framework import keras, plain, tf

logger = logging.getLogger(__name__)

MAX_SEED = 2**31
# operations that draw random numbers and count their draws themselves, where neither a checkpoint nor Python reaches
COUNTING = frozenset(
    {
        "AllCandidateSampler",
        "FixedUnigramCandidateSampler",
        "FractionalAvgPool",
        "FractionalMaxPool",
        "LearnedUnigramCandidateSampler",
        "LogUniformCandidateSampler",
        "Multinomial",
        "ParameterizedTruncatedNormal",
        "RandomCrop",
        "RandomGamma",
        "RandomPoisson",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "SampleDistortedBoundingBox",
        "SampleDistortedBoundingBoxV2",
        "ThreadUnsafeUnigramCandidateSampler",
        "TruncatedNormal",
        "UniformCandidateSampler",
    }
)


def seed_everything(seed: int, *, is_deterministic: bool = False, tf32: bool | None = None) -> None:
    """Seeds the generators of Python, numpy, Keras and TensorFlow, and sets determinism and matrix precision.

    Args:
        seed: for all generators.
        is_deterministic: replace or refuse operations whose results differ from call to call.
        tf32: compute float32 products in TensorFloat-32 on GPUs that support it; None leaves the setting unchanged.
    """
    keras.utils.set_random_seed(seed)
    tf.random.set_global_generator(tf.random.Generator.from_seed(seed))
    if is_deterministic:
        tf.config.experimental.enable_op_determinism()
    if tf32 is not None:
        tf.config.experimental.enable_tensor_float_32_execution(tf32)


def hold_generators(model: object, seed: int) -> None:
    """Gives the layers of a tf_keras model generators whose state is a variable, each with its own seed.

    By default, dropout in tf_keras uses operations with internal state, which cannot be saved in a checkpoint, unless
    `tf_keras.backend.experimental.enable_tf_random_generator()` was called before the model was created.
    """
    for place, generator in enumerate(layer_generators(model)):
        if generator._rng_type == generator.RNG_LEGACY_STATEFUL:
            generator._rng_type = generator.RNG_STATEFUL
            if generator._seed is None:
                generator._seed = int(np.random.SeedSequence([seed, place]).generate_state(1)[0]) % MAX_SEED
            generator._built = False
            generator._maybe_init()


def keras_state() -> Any:
    """Returns the state of Keras' global generator, from which `keras.random` draws without a seed.

    If there is none yet, it is created, in the strategy's scope of the caller. Keras draws its seed from Python's
    generator, which is left as it was.
    """
    before = random.getstate()
    try:
        return plain(require("keras.src.random.seed_generator", "tf").global_seed_generator().state)
    finally:
        random.setstate(before)


def layer_generators(model: object) -> Iterator[Any]:
    """Yields the generators of the layers of a tf_keras model, in the order of the layers."""
    for layer in getattr(model, "submodules", ()):
        generator = getattr(layer, "_random_generator", None)
        if generator is not None and hasattr(generator, "_rng_type"):
            yield generator


def layer_states(model: object) -> list[Any]:
    """Returns the states of the random generators of a model's layers."""
    own = [plain(v) for v in getattr(model, "variables", ()) if "seed_generator_state" in str(getattr(v, "path", ""))]
    held = [generator._generator for generator in layer_generators(model) if generator._built]
    return [*own, *(generator.state for generator in held if generator is not None)]


def random_variables(model: object) -> list[Any]:
    """Returns the states of the random generators of the model's layers, and of TensorFlow's global generator."""
    return [*layer_states(model), tf.random.get_global_generator().state]


class UncountedDraws:
    """The random operations in the functions of a run that keep their state to themselves.

    These are `tf.nn.dropout`, `tf.random.normal` and others of TensorFlow without a generator, as in a `tf.Module` or a
    loss function. After a resume, they draw the numbers of the first optimizer steps again.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._is_told = False

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Returns a context that looks through the graph which is traced in it, and the functions that it calls."""
        yield
        try:
            definition = tf.compat.v1.get_default_graph().as_graph_def()
        except ValueError:  # larger than the 2 GB of a message
            return
        nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
        found = {node.name for node in nodes if node.op in COUNTING}
        self.names = sorted({*self.names, *found}, key=lambda name: (len(name), name))

    def tell(self) -> None:
        """Warns once, if there are any."""
        if self._is_told or not self.names:
            return
        self._is_told = True
        logger.warning(
            "The training step draws random numbers whose state no checkpoint holds (%s): after a resume they are "
            "those of its first steps again, not those of a run without a stop. Draw with keras.random, such as "
            "keras.random.dropout(x, 0.1) (on several replicas with a SeedGenerator of a Keras layer), or with "
            "tf.random.get_global_generator(): their states are saved.",
            ", ".join(self.names[:3]) + (f" and {len(self.names) - 3} more" if len(self.names) > 3 else ""),
        )


def capture_random() -> dict[str, Any]:
    """Returns the states of Python's and numpy's global generators, JSON-serializable."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }


def restore_random(state: Mapping[str, Any]) -> None:
    """Restores the result of `capture_random`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
