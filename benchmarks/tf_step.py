"""What a step costs with TensorFlow: TFTrainer, Keras' fit and a bare tf.function loop on one model.

A Keras model of four layers, batches of 128 from arrays in memory in an order drawn anew in each epoch, clipping by the
global norm, a linear schedule, AdamW, two threads. All contenders train in one process and take turns of one epoch (40
steps), the others waiting: what else runs on the machine meets them alike. A ratio is taken within a turn, and the
median over the turns is given, of wall time and of the CPU time of the process with all its threads. The first turns,
in which functions are traced, do not count.

    python benchmarks/tf_step.py [--quick] [--rounds 15] [--contenders loop paceline fit]
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from measure import (
    Measured,
    choose_contenders,
    make_parser,
    ratios,
    report_from_child,
    run_child,
    summarize,
    target,
    write_result,
)

STEPS, QUICK_STEPS = 40, 5  # of an epoch, which is a turn
WARM_TURNS = 2
FEATURES, HIDDEN, CLASSES, BATCH_SIZE = 512, 1024, 32, 128
LEARNING_RATE, WEIGHT_DECAY, MAX_NORM = 1e-3, 0.01, 1.0
LIMIT_LOOP, LIMIT_FIT = 1.05, 1.0
NEEDS = {"loop": "tensorflow", "paceline": "tensorflow", "fit": "tensorflow"}
KEYS = {"wall_ms": "wall time", "cpu_ms": "CPU time"}
MINUTES_OF_A_TURN = 5


class Turns:
    """Lets contenders, each on a thread of its own, run one after the other, a turn at a time.

    Args:
        names: of the contenders, in their order.
        num_steps: of a turn.
    """

    def __init__(self, names: list[str], num_steps: int) -> None:
        self.names, self.num_steps = names, num_steps
        self.gates = {name: threading.Semaphore(0) for name in names}
        self.taken: dict[str, list[Measured]] = {name: [] for name in names}
        self.ended: set[str] = set()
        self.failed: BaseException | None = None

    def begin(self, name: str) -> None:
        """Wait for the first turn."""
        if not self.gates[name].acquire(timeout=60 * MINUTES_OF_A_TURN):
            raise TimeoutError(f"{name} waited in vain for its turn.")
        if self.failed is not None:
            raise InterruptedError(f"{name} stops: another contender failed.")
        self.started = time.perf_counter(), time.process_time()

    def end(self, name: str) -> None:
        """Note what the turn took, let the next contender run, and wait."""
        wall, cpu = time.perf_counter() - self.started[0], time.process_time() - self.started[1]
        self.taken[name].append({"wall_ms": 1e3 * wall / self.num_steps, "cpu_ms": 1e3 * cpu / self.num_steps})
        self.pass_on(name)
        self.begin(name)

    def pass_on(self, name: str) -> None:
        place = self.names.index(name)
        others = [*self.names[place + 1 :], *self.names[: place + 1]]
        following = next((other for other in others if other not in self.ended), None)
        if following is not None:
            self.gates[following].release()

    def run(self, contenders: dict[str, Callable[[Callable[[], None], int, int], None]], epochs: int) -> None:
        """Run them all for so many turns."""

        def work(name: str) -> None:
            try:
                self.begin(name)
                contenders[name](lambda: self.end(name), epochs, self.num_steps)
            except BaseException as error:
                self.failed = self.failed or error
            self.ended.add(name)
            self.pass_on(name)

        threads = [threading.Thread(target=work, args=(name,)) for name in self.names[1:]]
        for thread in threads:
            thread.start()
        self.gates[self.names[0]].release()
        work(self.names[0])  # on the main thread
        for thread in threads:
            thread.join()
        if self.failed is not None:
            raise self.failed


def make_model() -> Any:
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(HIDDEN, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(CLASSES)])


def make_data(num_steps: int) -> tuple[Any, Any]:
    import numpy as np

    choice = np.random.default_rng(1)
    size = num_steps * BATCH_SIZE
    return choice.normal(size=(size, FEATURES)).astype(np.float32), choice.integers(0, CLASSES, size)


def make_optimizer(model: Any, num_steps: int, **options: Any) -> Any:
    """AdamW under a linear schedule; weights decay, biases do not."""
    import keras

    schedule = keras.optimizers.schedules.PolynomialDecay(LEARNING_RATE, num_steps, 0.0)
    optimizer = keras.optimizers.AdamW(schedule, weight_decay=WEIGHT_DECAY, epsilon=1e-8, **options)
    optimizer.exclude_from_weight_decay(var_list=[v for v in model.trainable_variables if v.path.endswith("bias")])
    return optimizer


# ---- the contenders: each trains a fresh model for so many epochs, and says when one is done


def by_hand(done: Callable[[], None], epochs: int, num_steps: int) -> None:
    """The loop that a careful person writes."""
    import numpy as np
    import tensorflow as tf

    x, y = make_data(num_steps)
    model = make_model()
    optimizer = make_optimizer(model, epochs * num_steps)
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

    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(x))
        losses = []
        for start in range(0, len(x), BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            losses.append(step(tf.convert_to_tensor(x[rows]), tf.convert_to_tensor(y[rows]))[0])
        print(epoch, float(np.mean([loss.numpy() for loss in losses])))
        done()


def by_paceline(done: Callable[[], None], epochs: int, num_steps: int) -> None:
    import paceline

    class Handover(paceline.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in (logs or {}):
                done()

    with tempfile.TemporaryDirectory() as folder:
        args = paceline.TFTrainingArguments(
            output_dir=folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=BATCH_SIZE,
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=MAX_NORM,
            logging_steps=num_steps,
            save_strategy="no",
            stop_signals=False,
            disable_tqdm=True,
        )
        trainer = paceline.TFTrainer(make_model(), args, make_data(num_steps), callbacks=[Handover()])
        trainer.train()
        assert trainer.state.global_step == epochs * num_steps


def by_fit(done: Callable[[], None], epochs: int, num_steps: int) -> None:
    import keras

    class Handover(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            done()

    model = make_model()
    optimizer = make_optimizer(model, epochs * num_steps, global_clipnorm=MAX_NORM)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    x, y = make_data(num_steps)
    model.fit(x, y, batch_size=BATCH_SIZE, epochs=epochs, verbose=0, callbacks=[Handover()])


CONTENDERS: dict[str, Callable[[Callable[[], None], int, int], None]] = {
    "loop": by_hand,
    "paceline": by_paceline,
    "fit": by_fit,
}


def child(names: list[str], rounds: int, num_steps: int) -> None:
    turns = Turns(names, num_steps)
    turns.run(CONTENDERS, WARM_TURNS + rounds)
    report_from_child({name: taken[WARM_TURNS:] for name, taken in turns.taken.items()})


def main() -> None:
    parser = make_parser(__doc__ or "", rounds=15)
    arguments = parser.parse_args()
    num_steps = QUICK_STEPS if arguments.quick else STEPS
    rounds = 1 if arguments.quick else arguments.rounds
    contenders = choose_contenders(NEEDS, arguments.contenders)
    if arguments.child:
        child(contenders, rounds, num_steps)
        return
    passed = ["--child", "all", "--rounds", str(rounds), *(["--quick"] if arguments.quick else [])]
    measured = run_child(__file__, [*passed, "--contenders", *contenders], num_threads=2)
    over = {(key, base): ratios(measured, key, base) for key in KEYS for base in ("loop", "fit")}
    rows = {
        name: {
            **{key: summarize([row[key] for row in measured[name]]) for key in KEYS},
            **{f"{key}_over_{base}": found.get(name) for (key, base), found in over.items()},
        }
        for name in contenders
    }

    def limit(name: str, key: str, base: str, value: float) -> dict[str, Any]:
        found = over[key, base].get("paceline")
        return target(f"{name}, {KEYS[key]}", found["median"] if found else None, value, "times")

    targets = [
        limit(name, key, base, value)
        for key in KEYS
        for name, base, value in (
            ("TFTrainer over a bare tf.function loop", "loop", LIMIT_LOOP),
            ("TFTrainer over Keras' fit", "fit", LIMIT_FIT),
        )
    ]
    num_parameters = FEATURES * HIDDEN + 2 * HIDDEN**2 + HIDDEN * CLASSES + 3 * HIDDEN + CLASSES
    settings = {"steps": num_steps, "batch_size": BATCH_SIZE, "parameters": num_parameters}
    write_result(arguments, "tf_step", {"settings": settings, "rows": rows, "targets": targets})


if __name__ == "__main__":
    sys.exit(main())
