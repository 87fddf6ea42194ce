"""Random state in TensorFlow: seeds, the generators that a checkpoint holds, and those of Python and numpy."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from paceline.tf.framework import keras, plain, tf

MAX_SEED = 2**31


def seed_everything(args: Any) -> None:
    """The seeds and the determinism that the arguments ask for."""
    keras.utils.set_random_seed(args.seed)
    tf.random.set_global_generator(tf.random.Generator.from_seed(args.seed))
    if args.full_determinism:
        tf.config.experimental.enable_op_determinism()
    if args.tf32 is not None:
        tf.config.experimental.enable_tensor_float_32_execution(args.tf32)


def hold_generators(model: Any, seed: int) -> None:
    """Let the layers of a tf_keras model draw from generators whose state is a variable, each with a seed of its own.

    Dropout there draws from operations that keep their state to themselves, where no checkpoint reaches it, unless
    `tf_keras.backend.experimental.enable_tf_random_generator()` was called before the model was made.
    """
    for place, generator in enumerate(layer_generators(model)):
        if generator._rng_type == generator.RNG_LEGACY_STATEFUL:
            generator._rng_type = generator.RNG_STATEFUL
            if generator._seed is None:
                generator._seed = int(np.random.SeedSequence([seed, place]).generate_state(1)[0]) % MAX_SEED
            generator._built = False
            generator._maybe_init()


def layer_generators(model: Any) -> Iterator[Any]:
    """What the layers of a tf_keras model draw from, in the order of the layers."""
    for layer in getattr(model, "submodules", ()):
        generator = getattr(layer, "_random_generator", None)
        if generator is not None and hasattr(generator, "_rng_type"):
            yield generator


def random_variables(model: Any) -> list[Any]:
    """The states of random generators: those of the model's layers, and TensorFlow's global one."""
    own = [plain(v) for v in getattr(model, "variables", ()) if "seed_generator_state" in str(getattr(v, "path", ""))]
    held = [generator._generator for generator in layer_generators(model) if generator._built]
    states = [generator.state for generator in held if generator is not None]
    return [*own, *states, tf.random.get_global_generator().state]


def capture_random() -> dict[str, Any]:
    """The states of Python's and numpy's global generators, JSON-able."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }


def restore_random(state: Mapping[str, Any]) -> None:
    """Put back what `capture_random` took."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
