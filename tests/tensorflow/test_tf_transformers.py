"""The TF models of transformers 4.57, the last release that has them, in an environment of their own."""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from tf_environments import make_environment, run_in

JOB = '''
import importlib.util, json, shutil, sys
from pathlib import Path

import numpy as np
import tf_keras
from transformers import (
    BertConfig, GPT2Config, T5Config, TFBertForSequenceClassification, TFGPT2LMHeadModel, TFT5ForConditionalGeneration
)

from paceline import TFTrainer, KerasMetricCallback
from paceline.cli.main import main
from paceline.tensorflow.framework import tf
from tf_models import losses, make_trainer, values, weights

assert importlib.util.find_spec("torch") is None
folder = Path(sys.argv[1])
choice = np.random.default_rng(0)
tokens = choice.integers(2, 50, (20, 8))
mask = np.ones_like(tokens)
mask[::3, 6:] = 0
inputs = {"input_ids": tokens, "attention_mask": mask}
ragged = np.where(mask == 0, -100, tokens)
ragged[1, 2:] = -100
width = dict(vocab_size=50)
layers = dict(num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
bert = BertConfig(hidden_size=16, num_labels=3, **layers, **width)
gpt2 = GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=1, **width)
t5 = T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0, **width)
TASKS = {
    "bert": (TFBertForSequenceClassification, bert, tokens[:, 0] % 3),
    "gpt2": (TFGPT2LMHeadModel, gpt2, ragged),
    "t5": (TFT5ForConditionalGeneration, t5, ragged[:, ::-1].copy()),
}


# a plain model of tf_keras: what save_model wrote is read again
def dense(seed, width=3):
    tf_keras.utils.set_random_seed(seed)
    return tf_keras.Sequential([tf_keras.layers.Dense(width, input_shape=(8,))])


saver = make_trainer(folder / "dense", dense(0), None)
saver.save_model()
loader = make_trainer(folder / "other", dense(1), None)
assert (weights(loader.model) != weights(saver.model)).any()
loader._load_from_checkpoint(str(folder / "dense"))
assert (weights(loader.model) == weights(saver.model)).all()
try:
    make_trainer(folder / "wide", dense(0, width=4), None)._load_from_checkpoint(str(folder / "dense"))
except ValueError as error:
    assert "does not fit this model" in str(error), error
else:
    raise AssertionError("a model of another width was loaded")


def make(kind, config, seed=0):
    tf_keras.utils.set_random_seed(seed)
    return kind(config)


for name, (kind, config, labels) in TASKS.items():
    place = folder / name
    joined = {**inputs, "labels": labels}
    options = dict(num_train_epochs=2, learning_rate=1e-2, weight_decay=0.01, save_strategy="steps", save_steps=5,
                   warmup_steps=2, eval_strategy="epoch", eval_dataset=joined)
    # the labels in the inputs, as the model takes them: its own loss
    whole = make_trainer(place / "whole", make(kind, config), joined, **options)
    whole.train()
    assert losses(whole)[-1] < losses(whole)[0], losses(whole)
    assert whole.engine.num_traces <= 3
    # dropout, order and moments go on where they were
    shutil.copytree(place / "whole" / "checkpoint-5", place / "resumed" / "checkpoint-5")
    resumed = make_trainer(place / "resumed", make(kind, config, seed=1), (inputs, labels), **options)
    resumed.train()
    assert values(resumed.state.log_history)[:-1] == values(whole.state.log_history)[:-1], name
    assert (weights(resumed.model) == weights(whole.model)).all()
    # what was saved is read by from_pretrained, and says the same
    resumed.save_model(place / "saved")
    read = kind.from_pretrained(str(place / "saved"))
    found = make_trainer(place / "read", read, None, **{**options, "eval_strategy": "no"}).predict((inputs, labels))
    expected = whole.predict(joined)
    assert expected.predictions is not None and expected.label_ids.shape == labels.shape
    leaves = [tf.nest.flatten(output.predictions) for output in (found, expected)]
    assert all((one == other).all() for one, other in zip(*leaves, strict=True))
    assert found.metrics["test_loss"] == expected.metrics["test_loss"]
    if name == "gpt2":
        # the mean over the targets of the whole set, each token compared with the next one
        logits = expected.predictions[0] if isinstance(expected.predictions, tuple) else expected.predictions
        counted = labels[:, 1:] != -100
        right = tf.nn.sparse_softmax_cross_entropy_with_logits(np.where(counted, labels[:, 1:], 0), logits[:, :-1])
        mean = float((right.numpy() * counted).sum() / counted.sum())
        assert abs(mean - expected.metrics["test_loss"]) < 1e-5, (mean, expected.metrics)
    print(name, "went on to the bit")

# the command trains one that a file describes, and finds what it saved
(folder / "own.py").write_text("""
import numpy as np
from transformers import BertConfig, TFBertForSequenceClassification
tokens = np.random.default_rng(0).integers(2, 50, (20, 8))
def make(): return TFBertForSequenceClassification(BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1,
                                                             num_attention_heads=2, intermediate_size=32))
def data(): return {part: {"input_ids": tokens, "labels": tokens[:, 0] % 2} for part in ("train", "eval")}
""")
job = folder / "job.yaml"
job.write_text(f"{{framework: tf, model: own:make, data: own:data, max_steps: 3, output_dir: {folder}/job}}")
assert main(["train", str(job)]) == 0
results = Path(folder, "job", "eval_results.json")
before = json.loads(results.read_text())["eval_loss"]
assert main(["train", str(job), "--do_eval"]) == 0
after = json.loads(results.read_text())["eval_loss"]
assert abs(after - before) < 1e-6, (before, after)
print("trained by the command")

# a metric over what the model generates, in Keras' own fit
seen = []


def exact(predictions, labels):
    seen.append((predictions, labels))
    return {"length": predictions.shape[1]}


batches = tf.data.Dataset.from_tensor_slices(({**inputs}, TASKS["t5"][2])).batch(6)
model = whole.model
callback = KerasMetricCallback(exact, batches, predict_with_generate=True, generate_kwargs={"max_new_tokens": 4})
model.compile(optimizer="sgd")
joined = tf.data.Dataset.from_tensor_slices({**inputs, "labels": np.maximum(TASKS["t5"][2], 0)}).batch(10)
history = model.fit(joined, epochs=1, verbose=0, callbacks=[callback])
(predictions, labels), = seen
assert predictions.shape[0] == labels.shape[0] == 20 and predictions.shape[1] <= 5
assert history.history["length"] == [predictions.shape[1]]
again = np.concatenate([
    np.pad(part, ((0, 0), (0, predictions.shape[1] - part.shape[1])), constant_values=-100)
    for part in (model.generate(x["input_ids"], attention_mask=x["attention_mask"], max_new_tokens=4).numpy()
                 for x, _ in batches)
])
assert (again == predictions).all()
print("generated")
'''


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform == "win32", reason="needs links")
@pytest.mark.nightly
def test_models_of_transformers(tmp_path: Path) -> None:
    release = ".".join(version("tensorflow").split(".")[:2])
    python = make_environment(tmp_path / "environment", ["transformers==4.57.6", f"tf-keras=={release}.*"])
    told = run_in(python, JOB, str(tmp_path), timeout=300)
    assert [f"{name} went on to the bit" in told for name in ("bert", "gpt2", "t5")] == [True] * 3
    assert "trained by the command" in told
    assert "generated" in told
