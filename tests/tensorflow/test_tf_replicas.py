"""Replicas, precision and XLA: the same numbers however an update is cut, and no tracing from step to step."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tf_worker_job
from tf_environments import run_in
from tf_models import FEATURES, Linear, losses, make_data, make_model, make_trainer, weights

from paceline import GradientAccumulator, TFTrainer, TFTrainingArguments, TrainerCallback, UnsupportedOption
from paceline.tensorflow.data.batches import share_out
from paceline.tensorflow.evaluation import Predictor
from paceline.tensorflow.framework import keras, tf
from paceline.tensorflow.objective import Objective
from paceline.tensorflow.precision import needs_loss_scale

DATA = make_data(26)
OPTIONS: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.3, "max_grad_norm": 0.5, "num_train_epochs": 2}


def train(folder: Path, strategy: Any = None, make: Any = make_model, **options: Any) -> TFTrainer:
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = make()
    trainer = make_trainer(folder, model, DATA, **{**OPTIONS, **options})
    trainer.train()
    return trainer


def numbers(trainer: TFTrainer) -> list[Any]:
    history = trainer.state.log_history
    norms = [row["grad_norm"] for row in history if "grad_norm" in row]
    predicted = trainer.predict(DATA)
    assert np.array_equal(predicted.label_ids, DATA[1])
    return [losses(trainer), norms, weights(trainer.model), predicted.predictions, predicted.metrics["test_loss"]]


@pytest.mark.slow
def test_replicas_and_accumulation_change_nothing(tmp_path: Path, mirrored: Any) -> None:
    """26 samples in updates of 8: the last has 2, which two replicas and four micro-batches cannot share evenly."""
    cuts = {
        "one": (None, 8, 1),
        "accumulated": (None, 2, 4),
        "two replicas": (mirrored, 4, 1),
        "two replicas, accumulated": (mirrored, 2, 2),
    }
    found = {}
    for number, (name, (strategy, size, accumulation)) in enumerate(cuts.items()):
        trainer = train(
            tmp_path / str(number),
            strategy,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            per_device_eval_batch_size=5,
        )
        found[name] = numbers(trainer)
        assert trainer.engine is not None
        assert trainer.engine.num_traces <= (2 if accumulation == 1 else 4)  # one more for the batch that is not full
    for name in cuts:
        for value, expected in zip(found[name], found["one"], strict=True):
            assert np.allclose(value, expected, atol=1e-6), name


class Curious(TrainerCallback):
    wants = frozenset({"inputs", "outputs"})

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen += zip(kwargs["inputs"], map(np.asarray, kwargs["outputs"]), strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_callbacks_get_the_outputs_of_all_replicas(tmp_path: Path, mirrored: Any, accumulation: int) -> None:
    callback = Curious()
    options = {"gradient_accumulation_steps": accumulation, "learning_rate": 0.0, "num_train_epochs": 1}
    trainer = train(tmp_path, mirrored, callbacks=[callback], per_device_train_batch_size=4, **options)
    assert [len(inputs[0]) for inputs, _ in callback.seen] == [8, 8, 8, 2]
    for inputs, outputs in callback.seen:
        assert np.allclose(outputs, np.asarray(trainer.model(inputs[0])), atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_the_rows_of_a_replica_without_samples_are_left_out(size: int) -> None:
    """Of three samples on four replicas the first has none, and computes a copy of the first sample."""
    rows = np.arange(2.0 * size).reshape(size, 2)
    strategy = SimpleNamespace(num_replicas_in_sync=4, extended=SimpleNamespace(worker_devices=range(4)))
    steps: dict[str, Any] = {"prediction_step": None, "distributed_prediction_steps": None}
    predictor = Predictor(strategy=strategy, objective=Objective(Linear()), **steps)
    outputs = tuple(tf.constant(part) for part, _ in share_out(rows, 4))
    loss, found = predictor.read((rows, None), ((None,) * 4, outputs))
    assert loss is None
    assert np.array_equal(found, rows)


FOUR_REPLICAS = """
import sys
from pathlib import Path
import numpy as np
from paceline import TrainerCallback
from paceline.tensorflow.framework import tf
from tf_models import make_data, make_model, make_trainer
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
)
class Curious(TrainerCallback):
    wants = frozenset({"inputs", "outputs"})
    sizes = []
    def on_step_end(self, args, state, control, model=None, **kwargs):
        for inputs, outputs in zip(kwargs["inputs"], kwargs["outputs"], strict=True):
            assert np.allclose(outputs, np.asarray(model(inputs[0])), atol=1e-6)
            self.sizes.append(len(outputs))
strategy = tf.distribute.MirroredStrategy([f"cpu:{number}" for number in range(4)])
with strategy.scope():
    model = make_model()
options = dict(learning_rate=0.0, per_device_train_batch_size=2, per_device_eval_batch_size=2)
trainer = make_trainer(Path(sys.argv[1]), model, make_data(11), callbacks=[Curious()], **options)
trainer.train()
assert Curious.sizes == [8, 3], Curious.sizes
for size in (9, 10, 11):
    data = make_data(size)
    found = trainer.predict(data)
    assert np.allclose(found.predictions, np.asarray(model(data[0])), atol=1e-6), size
    assert np.array_equal(found.label_ids, data[1])
print("every row is there once")
"""


@pytest.mark.slow
def test_fewer_samples_than_replicas(tmp_path: Path) -> None:
    """In a process of its own, since the strategies of a process share one table of collectives."""
    assert "every row is there once" in run_in(sys.executable, FOUR_REPLICAS, str(tmp_path))


def test_callbacks_get_no_outputs_of_a_replica_without_samples(tmp_path: Path, mirrored: Any) -> None:
    callback = Curious()
    with mirrored.scope():
        model = make_model()
    options = {"per_device_train_batch_size": 2, "learning_rate": 0.0, "train_sampling_strategy": "sequential"}
    make_trainer(tmp_path, model, make_data(5), callbacks=[callback], **options).train()
    assert [len(outputs) for _, outputs in callback.seen] == [4, 1]
    assert np.allclose(callback.seen[1][1], np.asarray(model(make_data(5)[0][4:])), atol=1e-6)


LIMITS: dict[str, Any] = {
    "clipnorm": lambda: keras.optimizers.SGD(1.0, clipnorm=0.01),
    "global_clipnorm": lambda: keras.optimizers.SGD(1.0, global_clipnorm=0.01),
    "clipvalue": lambda: keras.optimizers.SGD(1.0, clipvalue=0.01),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0, clipnorm=0.01)),
}


@pytest.mark.parametrize(
    "name", [name if name == "clipnorm" else pytest.param(name, marks=pytest.mark.slow) for name in LIMITS]
)
def test_an_optimizer_clips_on_replicas_as_on_one(tmp_path: Path, mirrored: Any, name: str) -> None:
    """Keras clips on each replica, before it adds up."""
    found = []
    for strategy, size in ((None, 8), (mirrored, 4)):
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            model, optimizers = make_model(), (LIMITS[name](), None)
        options: dict[str, Any] = {"max_steps": 1, "max_grad_norm": 0.0, "per_device_train_batch_size": size}
        make_trainer(tmp_path / str(size), model, make_data(8), optimizers=optimizers, **options).train()
        found.append(weights(model) - weights(make_model()))
    assert np.allclose(found[0], found[1], atol=1e-7)
    assert np.linalg.norm(found[0]) > 5e-3


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_replicas_leave_out_what_is_not_finite(tmp_path: Path, mirrored: Any, policy: str) -> None:
    """One sample spoils the update of both replicas, and of no other."""
    x, y = make_data(24)
    x[9] = np.inf
    found = []
    for strategy, size in ((None, 8), (mirrored, 4)):
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            model = make_model()
        options = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": size}
        trainer = make_trainer(tmp_path / str(size), model, (x, y), nonfinite_policy=policy, logging_steps=1, **options)
        trainer.train()
        assert np.isfinite(weights(trainer.model)).all()
        rates = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
        steps = trainer.state.global_step, int(np.asarray(trainer.optimizer.iterations))
        found.append((weights(trainer.model), rates, *steps))
    assert np.allclose(found[0][0], found[1][0], atol=1e-6)
    assert found[0][1] == found[1][1]
    assert found[0][2:] == found[1][2:] == ((3, 2) if policy == "skip" else (2, 2))


def test_an_own_update_cannot_be_left_out_on_replicas(tmp_path: Path, mirrored: Any) -> None:
    class Own(TFTrainer):
        def apply_gradients(self, features: Any, labels: Any, nb_instances_in_global_batch: Any) -> Any:
            raise AssertionError

    with mirrored.scope():
        model = Linear()
    trainer = make_trainer(tmp_path, model, DATA, kind=Own, nonfinite_policy="skip")
    with pytest.raises(UnsupportedOption, match=r"apply_gradients .*nonfinite_policy='skip' on 2 replicas"):
        trainer.train()


def test_gradients_add_up_on_each_replica(mirrored: Any) -> None:
    with mirrored.scope():
        accumulator = GradientAccumulator()
        assert int(accumulator.step) == 0

    def add_one() -> Any:
        accumulator([tf.constant([1.0])])
        return tf.identity(accumulator.step), accumulator.gradients[0]

    @tf.function  # type: ignore[untyped-decorator]
    def add() -> Any:
        return mirrored.run(add_one)

    add()
    _, sums = add()
    assert int(accumulator.step) == 2
    assert [value.numpy().tolist() for value in mirrored.experimental_local_results(sums)] == [[2.0], [2.0]]
    accumulator.reset()
    assert int(accumulator.step) == 0
    assert [value.numpy().tolist() for value in mirrored.experimental_local_results(add()[1])] == [[1.0], [1.0]]


@pytest.mark.slow
def test_the_strategy_is_that_of_the_model(tmp_path: Path, mirrored: Any) -> None:
    with mirrored.scope():
        model = Linear()
    assert make_trainer(tmp_path, model, DATA).strategy is mirrored
    with pytest.raises(ValueError, match="was not built for 2 replicas"):
        make_trainer(tmp_path, Linear(), DATA, strategy=mirrored)
    made = make_trainer(tmp_path, None, DATA, model_init=make_model, strategy=mirrored)
    made.train()
    assert made.n_replicas == 2
    args = TFTrainingArguments(str(tmp_path))
    assert args._setup_strategy is args.strategy
    assert made.state.global_step == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "fp16", pytest.param("xla", marks=pytest.mark.slow)])
def test_precision_and_compilation(tmp_path: Path, name: str, mirrored: Any) -> None:
    plain = train(tmp_path / "plain")
    for strategy in (None, mirrored) if name != "bf16" else (None,):
        options = {name: True, "per_device_train_batch_size": 4 if strategy is None else 2}
        other = train(tmp_path / f"{strategy}", strategy, **options)
        assert np.allclose(losses(other), losses(plain), rtol=1e-5 if name == "xla" else 0.02)
        assert losses(other) != losses(plain) or name == "xla"
        assert [layer.dtype_policy.name for layer in other.model.layers] == ["float32", "float32"]
        assert hasattr(other.optimizer, "dynamic_scale") == (name == "fp16")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_an_evaluation_has_one_precision(tmp_path: Path, name: str) -> None:
    """Before a run, in it, after it, and by a Trainer that never trained: the same loss, and not that of float32."""
    options: dict[str, Any] = {"learning_rate": 0.0, "eval_dataset": DATA, "eval_strategy": "epoch", name: True}
    first = make_trainer(tmp_path / "first", make_model(), DATA, **options)
    before = first.evaluate()["eval_loss"]
    first.train()
    late = make_trainer(tmp_path / "late", make_model(), DATA, **options)
    late.train()
    fresh = make_trainer(tmp_path / "fresh", make_model(), DATA, **options)
    during = [row["eval_loss"] for one in (first, late) for row in one.state.log_history if "eval_loss" in row]
    others = [one.evaluate()["eval_loss"] for one in (first, late, fresh)]
    assert len(during) >= 2
    assert {before, *during, *others, fresh.predict(DATA).metrics["test_loss"]} == {before}
    assert make_trainer(tmp_path / "plain", make_model(), None).evaluate(DATA)["eval_loss"] != before
    assert [layer.dtype_policy.name for layer in fresh.model.layers] == ["float32", "float32"]


@pytest.mark.slow
def test_an_overflow_is_left_out(tmp_path: Path) -> None:
    """The scale of the loss starts so high that the first updates overflow; they are not applied, and are no error."""
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**40)
    trainer = make_trainer(tmp_path, make_model(), DATA, fp16=True, optimizers=(optimizer, None), max_steps=40)
    before = weights(trainer.model)
    trainer.train()
    assert np.isfinite(weights(trainer.model)).all()
    assert not np.array_equal(weights(trainer.model), before)
    assert 0 < int(optimizer.iterations) < 40
    assert "grad_norm" not in trainer.state.log_history[0]


def test_a_model_that_computes_in_float16_is_trained_with_a_loss_scale(tmp_path: Path) -> None:
    """Without fp16=True, too: gradients of 1e-8 would be 0."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        layers = [keras.Input((FEATURES,)), keras.layers.Dense(1, kernel_initializer="zeros")]
        model = keras.Sequential(layers)
    finally:
        keras.config.set_dtype_policy("float32")
    data = make_data(256)[0], np.full((256, 1), 1e-6, np.float32)
    trainer = make_trainer(tmp_path, model, data, per_device_train_batch_size=256)
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0
    assert needs_loss_scale(model, keras.optimizers.SGD(0.1), "no")
    assert not needs_loss_scale(model, trainer.optimizer, "no")
    assert not needs_loss_scale(model, keras.optimizers.SGD(0.1, loss_scale_factor=64.0), "no")
    assert not needs_loss_scale(make_model(), keras.optimizers.SGD(0.1), "no")
    model.compile(keras.optimizers.SGD(0.1), "mse", auto_scale_loss=False)
    assert not needs_loss_scale(model, model.optimizer, "no")
    assert needs_loss_scale(model, model.optimizer, "fp16")


def test_a_module_that_cannot_change_its_types_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bf16=True: a Linear computes in the types of its own variables"):
        make_trainer(tmp_path, Linear(), DATA, bf16=True).train()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_starts"), [("module", 1), pytest.param("keras", 2, marks=pytest.mark.nightly)])
def test_two_workers(tmp_path: Path, kind: str, num_starts: int) -> None:
    """Two processes on loopback, accumulating: the run of one process; and where it is resumed, too."""
    alone = tf_worker_job.train(tmp_path / "alone", kind, None, batch_size=4)
    for start in range(num_starts):  # the second goes on from the checkpoint in the middle
        ports = [free_port() for _ in range(2)]
        workers = [start_worker(tmp_path, kind, index, ports) for index in range(2)]
        for worker in workers:
            _, said = worker.communicate(timeout=240)
            assert worker.returncode == 0, said.decode()[-3000:]
        found = [json.loads((tmp_path / f"worker-{index}.json").read_text()) for index in range(2)]
        assert found[0] == found[1]
        assert np.allclose(found[0]["losses"], alone["losses"], atol=1e-5), start
        assert np.allclose(found[0]["weights"], alone["weights"], atol=1e-5), start
        assert found[0]["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-5)
        for path in tmp_path.glob("two/checkpoint-[4-9]"):
            path.rename(tmp_path / f"{path.name}-{start}")


def start_worker(folder: Path, kind: str, index: int, ports: list[int]) -> "subprocess.Popen[bytes]":
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
    environment = dict(os.environ, TF_CONFIG=config, TF_CPP_MIN_LOG_LEVEL="3", PYTHONPATH=os.pathsep.join(sys.path))
    command = [sys.executable, tf_worker_job.__file__, str(folder), kind, str(index)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
