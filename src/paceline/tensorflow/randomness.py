"""Random state in TensorFlow: seeds, the generators in a checkpoint, and those of Python and numpy."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from paceline.tensorflow.framework import keras, plain, tf

MAX_SEED = 2**31


def seed_everything(seed: int, *, is_deterministic: bool = False, tf32: bool | None = None) -> None:
    """Seeds the generators of Python, numpy, Keras and TensorFlow, and sets which operations these may use.

    Args:
        seed: of all generators.
        is_deterministic: operations that give other bits from call to call are replaced, or refused.
        tf32: products of float32 in TensorFloat-32 on GPUs that have it; None: as it is.
    """
    keras.utils.set_random_seed(seed)
    tf.random.set_global_generator(tf.random.Generator.from_seed(seed))
    if is_deterministic:
        tf.config.experimental.enable_op_determinism()
    if tf32 is not None:
        tf.config.experimental.enable_tensor_float_32_execution(tf32)


def hold_generators(model: object, seed: int) -> None:
    """Gives the layers of a tf_keras model generators whose state is a variable, each with its own seed.

    Dropout there draws from operations that keep their state to themselves, which no checkpoint reaches, unless
    `tf_keras.backend.experimental.enable_tf_random_generator()` was called before the model was made.
    """
    for place, generator in enumerate(layer_generators(model)):
        if generator._rng_type == generator.RNG_LEGACY_STATEFUL:
            generator._rng_type = generator.RNG_STATEFUL
            if generator._seed is None:
                generator._seed = int(np.random.SeedSequence([seed, place]).generate_state(1)[0]) % MAX_SEED
            generator._built = False
            generator._maybe_init()


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
    """Returns the states of random generators: those of the model's layers, and TensorFlow's global one."""
    return [*layer_states(model), tf.random.get_global_generator().state]


def capture_random() -> dict[str, Any]:
    """Returns the states of Python's and numpy's global generators, JSON-able."""
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
