"""The cost of a step with TensorFlow: TFTrainer, Keras' fit and a bare tf.function loop on one model.

A Keras model, batches from arrays in memory in an order drawn anew in each epoch, clipping by the global norm, a linear
schedule, AdamW, two threads. `dense` is four layers and batches of 128; `small` four layers whose step takes about a
millisecond; `transformer` one block of attention over 64 tokens. All contenders train in one process and take turns of
one epoch, the others waiting: what else runs on the machine meets them alike. A ratio is taken within a turn, and the
median over the turns is given, of wall time and of the CPU time of the process with all its threads. The first turns,
in which functions are traced, do not count.

    python benchmarks/tf_step.py [--model dense|small|transformer] [--quick] [--rounds 15]
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
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

QUICK_STEPS = 5
WARM_TURNS = 2
LEARNING_RATE, WEIGHT_DECAY, MAX_NORM = 1e-3, 0.01, 1.0
LIMIT_LOOP, LIMIT_FIT = 1.05, 1.0
NEEDS = {"loop": "tensorflow", "paceline": "tensorflow", "fit": "tensorflow"}
KEYS = {"wall_ms": "wall time", "cpu_ms": "CPU time"}
MINUTES_OF_A_TURN = 5


@dataclass(frozen=True)
class Task:
    """A training task.

    Attributes:
        features, hidden, classes: widths of the layers; of the transformer, `features` is the number of tokens.
        batch_size: samples of an update.
        num_steps: of a turn, which is an epoch.
        is_text: a transformer block over tokens, instead of dense layers.
    """

    features: int
    hidden: int
    classes: int
    batch_size: int
    num_steps: int
    is_text: bool = False

    def make_model(self) -> Any:
        import keras

        keras.utils.set_random_seed(0)
        if self.is_text:
            return self.make_transformer()
        layers = [keras.layers.Dense(self.hidden, activation="relu") for _ in range(3)]
        return keras.Sequential([keras.Input((self.features,)), *layers, keras.layers.Dense(self.classes)])

    def make_transformer(self) -> Any:
        """One block: attention of four heads and two layers, each behind a norm; a class for every token."""
        from keras import Input, Model, layers

        tokens = Input((self.features,), dtype="int32")
        x = layers.Embedding(self.classes, self.hidden)(tokens)
        normed = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, self.hidden // 4)(normed, normed, use_causal_mask=True)
        wide = layers.Dense(4 * self.hidden, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(self.hidden)(wide)
        return Model(tokens, layers.Dense(self.classes)(layers.LayerNormalization()(x)))

    def make_data(self) -> tuple[Any, Any]:
        import numpy as np

        choice = np.random.default_rng(1)
        size = self.num_steps * self.batch_size
        if self.is_text:
            tokens = choice.integers(0, self.classes, (size, self.features))
            return tokens.astype(np.int32), (tokens + 1) % self.classes
        return choice.normal(size=(size, self.features)).astype(np.float32), choice.integers(0, self.classes, size)

    @property
    def num_parameters(self) -> int:
        return int(self.make_model().count_params())


TASKS = {
    "dense": Task(512, 1024, 32, batch_size=128, num_steps=40),
    "small": Task(64, 256, 10, batch_size=32, num_steps=200),
    "transformer": Task(64, 128, 256, batch_size=16, num_steps=40, is_text=True),
}


class Turns:
    """Lets contenders, each on a thread of its own, run one after the other, a turn at a time.

    Args:
        names: of the contenders, in their order.
        task: what they train.
    """

    def __init__(self, names: list[str], task: Task) -> None:
        self.names, self.task = names, task
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
        steps = self.task.num_steps
        self.taken[name].append({"wall_ms": 1e3 * wall / steps, "cpu_ms": 1e3 * cpu / steps})
        self.pass_on(name)
        self.begin(name)

    def pass_on(self, name: str) -> None:
        place = self.names.index(name)
        others = [*self.names[place + 1 :], *self.names[: place + 1]]
        following = next((other for other in others if other not in self.ended), None)
        if following is not None:
            self.gates[following].release()

    def run(self, contenders: dict[str, Callable[[Callable[[], None], int, Task], None]], epochs: int) -> None:
        """Run them all for so many turns."""

        def work(name: str) -> None:
            try:
                self.begin(name)
                contenders[name](lambda: self.end(name), epochs, self.task)
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


def make_optimizer(model: Any, num_steps: int, **options: Any) -> Any:
    """AdamW under a linear schedule; weights decay, biases do not."""
    import keras

    schedule = keras.optimizers.schedules.PolynomialDecay(LEARNING_RATE, num_steps, 0.0)
    optimizer = keras.optimizers.AdamW(schedule, weight_decay=WEIGHT_DECAY, epsilon=1e-8, **options)
    optimizer.exclude_from_weight_decay(var_list=[v for v in model.trainable_variables if v.path.endswith("bias")])
    return optimizer


# ---- the contenders: each trains a fresh model for so many epochs, and says when one is done


def by_hand(done: Callable[[], None], epochs: int, task: Task) -> None:
    """The loop that a careful person writes."""
    import numpy as np

    import tensorflow as tf

    x, y = task.make_data()
    model = task.make_model()
    optimizer = make_optimizer(model, epochs * task.num_steps)
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
        for start in range(0, len(x), task.batch_size):
            rows = order[start : start + task.batch_size]
            losses.append(step(tf.convert_to_tensor(x[rows]), tf.convert_to_tensor(y[rows]))[0])
        print(epoch, float(np.mean([loss.numpy() for loss in losses])))
        done()


def by_paceline(done: Callable[[], None], epochs: int, task: Task) -> None:
    import paceline

    class Handover(paceline.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in (logs or {}):
                done()

    with tempfile.TemporaryDirectory() as folder:
        args = paceline.TFTrainingArguments(
            output_dir=folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=task.batch_size,
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=MAX_NORM,
            logging_steps=task.num_steps,
            save_strategy="no",
            stop_signals=False,
            disable_tqdm=True,
        )
        trainer = paceline.TFTrainer(task.make_model(), args, task.make_data(), callbacks=[Handover()])
        trainer.train()
        assert trainer.state.global_step == epochs * task.num_steps


def by_fit(done: Callable[[], None], epochs: int, task: Task) -> None:
    import keras

    class Handover(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            done()

    model = task.make_model()
    optimizer = make_optimizer(model, epochs * task.num_steps, global_clipnorm=MAX_NORM)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    x, y = task.make_data()
    model.fit(x, y, batch_size=task.batch_size, epochs=epochs, verbose=0, callbacks=[Handover()])


CONTENDERS: dict[str, Callable[[Callable[[], None], int, Task], None]] = {
    "loop": by_hand,
    "paceline": by_paceline,
    "fit": by_fit,
}


def child(names: list[str], rounds: int, task: Task) -> None:
    turns = Turns(names, task)
    turns.run(CONTENDERS, WARM_TURNS + rounds)
    report_from_child({name: taken[WARM_TURNS:] for name, taken in turns.taken.items()})


def main() -> None:
    parser = make_parser(__doc__ or "", rounds=15)
    parser.add_argument("--model", choices=TASKS, default="dense", help="what is trained")
    arguments = parser.parse_args()
    task = TASKS[arguments.model]
    if arguments.quick:
        task = replace(task, num_steps=QUICK_STEPS)
    rounds = 1 if arguments.quick else arguments.rounds
    contenders = choose_contenders(NEEDS, arguments.contenders)
    if arguments.child:
        child(contenders, rounds, task)
        return
    passed = ["--child", "all", "--rounds", str(rounds), "--model", arguments.model]
    passed += ["--quick"] if arguments.quick else []
    measured = run_child(__file__, [*passed, "--contenders", *contenders], num_threads=2)
    over = {(key, base): ratios(measured, key, base) for key in KEYS for base in ("loop", "fit")}
    rows = {
        name: {
            **{key: summarize([row[key] for row in measured[name]]) for key in KEYS},
            **{f"{key}_over_{base}": found.get(name) for (key, base), found in over.items()},
        }
        for name in contenders
    }

    suffix = "" if arguments.model == "dense" else f", {arguments.model}"

    def limit(name: str, key: str, base: str, value: float) -> dict[str, Any]:
        found = over[key, base].get("paceline")
        return target(f"{name}{suffix}, {KEYS[key]}", found["median"] if found else None, value, "times")

    limits = [("TFTrainer over a bare tf.function loop", "loop", LIMIT_LOOP)] if arguments.model == "dense" else []
    limits.append(("TFTrainer over Keras' fit", "fit", LIMIT_FIT))
    targets = [limit(name, key, base, value) for key in KEYS for name, base, value in limits]
    settings = {"steps": task.num_steps, "batch_size": task.batch_size, "parameters": task.num_parameters}
    name = "tf_step" if arguments.model == "dense" else f"tf_step_{arguments.model}"
    write_result(arguments, name, {"settings": settings, "rows": rows, "targets": targets})


if __name__ == "__main__":
    sys.exit(main())
