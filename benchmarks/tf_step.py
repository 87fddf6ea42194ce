"""What a step costs with TensorFlow: CPU time per step of TFTrainer, of Keras' fit, and of a bare tf.function loop.

A Keras model of four layers, batches of 64 from arrays in memory in an order drawn anew, clipping by the global norm,
a linear schedule, AdamW, two threads. Each contender trains 200 and then 1,000 steps in one fresh process; what the
longer run takes more, divided by the 800 steps it has more, is the cost of a step: start and tracing cancel out. CPU
time is that of the whole process, all its threads: other work on the machine counts for less in it than in wall time.

    python benchmarks/tf_step.py [--quick] [--rounds 7] [--contenders loop paceline fit]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from measure import (
    choose_contenders,
    make_parser,
    ratios,
    report_from_child,
    run_child,
    summarize,
    take_turns,
    target,
    write_result,
)

STEPS = (200, 1000)
QUICK_STEPS = (10, 40)
FEATURES, HIDDEN, CLASSES, BATCH_SIZE, SAMPLES = 256, 512, 32, 64, 8192
LEARNING_RATE, WEIGHT_DECAY, MAX_NORM, LOG_EVERY = 1e-3, 0.01, 1.0, 100
LIMIT_LOOP, LIMIT_FIT = 1.05, 1.0
NEEDS = {"loop": "tensorflow", "paceline": "tensorflow", "fit": "tensorflow"}


def make_model() -> Any:
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(HIDDEN, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(CLASSES)])


def make_data() -> tuple[Any, Any]:
    import numpy as np

    choice = np.random.default_rng(1)
    x = choice.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
    return x, choice.integers(0, CLASSES, SAMPLES)


def make_optimizer(model: Any, num_steps: int, **options: Any) -> Any:
    """AdamW under a linear schedule; weights decay, biases do not."""
    import keras

    schedule = keras.optimizers.schedules.PolynomialDecay(LEARNING_RATE, num_steps, 0.0)
    optimizer = keras.optimizers.AdamW(schedule, weight_decay=WEIGHT_DECAY, epsilon=1e-8, **options)
    optimizer.exclude_from_weight_decay(var_list=[v for v in model.trainable_variables if v.path.endswith("bias")])
    return optimizer


# ---- the contenders: each trains a fresh model for so many steps


def by_hand(num_steps: int) -> None:
    """The loop that a careful person writes."""
    import numpy as np
    import tensorflow as tf

    x, y = make_data()
    model = make_model()
    optimizer = make_optimizer(model, num_steps)
    optimizer.build(model.trainable_variables)

    @tf.function  # type: ignore[untyped-decorator, unused-ignore]
    def step(features: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(features, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients, norm = tf.clip_by_global_norm(gradients, MAX_NORM)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss, norm

    done, losses = 0, []
    while done < num_steps:
        order = np.random.default_rng(done).permutation(SAMPLES)
        for start in range(0, SAMPLES, BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            losses.append(step(tf.convert_to_tensor(x[rows]), tf.convert_to_tensor(y[rows]))[0])
            done += 1
            if done % LOG_EVERY == 0:
                print(done, float(np.mean([loss.numpy() for loss in losses])))
                losses.clear()
            if done == num_steps:
                break


def by_paceline(num_steps: int) -> None:
    import paceline

    with tempfile.TemporaryDirectory() as folder:
        args = paceline.TFTrainingArguments(
            output_dir=folder,
            max_steps=num_steps,
            per_device_train_batch_size=BATCH_SIZE,
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=MAX_NORM,
            logging_steps=LOG_EVERY,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = paceline.TFTrainer(make_model(), args, make_data())
        trainer.train()
        assert trainer.state.global_step == num_steps


def by_fit(num_steps: int) -> None:
    import keras

    model = make_model()
    optimizer = make_optimizer(model, num_steps, global_clipnorm=MAX_NORM)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    x, y = make_data()
    per_epoch = SAMPLES // BATCH_SIZE
    epochs, rest = divmod(num_steps, per_epoch)
    model.fit(x, y, batch_size=BATCH_SIZE, epochs=epochs, verbose=0)
    if rest:
        model.fit(x[: rest * BATCH_SIZE], y[: rest * BATCH_SIZE], batch_size=BATCH_SIZE, verbose=0)


CONTENDERS: dict[str, Callable[[int], None]] = {"loop": by_hand, "paceline": by_paceline, "fit": by_fit}


def child(name: str, steps: tuple[int, int]) -> None:
    train = CONTENDERS[name]
    train(steps[0])
    seconds = []
    for number in steps:
        begin = time.process_time()
        train(number)
        seconds.append(time.process_time() - begin)
    report_from_child({"ms_per_step": 1e3 * (seconds[1] - seconds[0]) / (steps[1] - steps[0])})


def main() -> None:
    parser = make_parser(__doc__ or "", rounds=7)
    arguments = parser.parse_args()
    steps = QUICK_STEPS if arguments.quick else STEPS
    if arguments.child:
        child(arguments.child, steps)
        return
    contenders = choose_contenders(NEEDS, arguments.contenders)
    quick = ["--quick"] if arguments.quick else []
    measured = take_turns(
        contenders,
        1 if arguments.quick else arguments.rounds,
        lambda name: run_child(__file__, ["--child", name, *quick], num_threads=2),
    )
    over_loop, over_fit = ratios(measured, "ms_per_step", "loop"), ratios(measured, "ms_per_step", "fit")
    rows = {
        name: {
            "ms_per_step": summarize([row["ms_per_step"] for row in measured[name]]),
            "over_loop": over_loop.get(name),
            "over_fit": over_fit.get(name),
        }
        for name in contenders
    }

    def median(found: dict[str, dict[str, float]]) -> float | None:
        return found["paceline"]["median"] if "paceline" in found else None

    targets = [
        target("TFTrainer over a bare tf.function loop", median(over_loop), LIMIT_LOOP, "times"),
        target("TFTrainer over Keras' fit", median(over_fit), LIMIT_FIT, "times"),
    ]
    write_result(arguments, "tf_step", {"settings": {"steps": steps}, "rows": rows, "targets": targets})


if __name__ == "__main__":
    sys.exit(main())
