"""The runs that are made in transformers' Trainer and here, and every difference there may be between the two.

Nothing is imported here but the standard library: `tools/docs.py` writes docs/parity.md from these tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Defect:
    """A defect of transformers' Trainer, and the test that shows the behaviour here."""

    theirs: str
    ours: str
    proof: str


DEFECTS: dict[str, Defect] = {
    "first target": Defect(
        "The first target of every row counts in the divisor of a causal model's loss, although nothing predicts it.",
        "The divisor is the number of targets that are predicted.",
        "tests/pytorch/trainer/test_transformers_models.py::test_the_gradient_is_that_of_the_mean_over_targets",
    ),
    "mean of means": Defect(
        "`eval_loss` is the mean of the batches' means, so it changes with the evaluation batch size.",
        "`eval_loss` is the sum over targets divided by their number.",
        "tests/pytorch/trainer/test_splits.py::test_eval_loss_does_not_depend_on_the_batch_size",
    ),
    "sum over accumulation": Defect(
        "A model whose forward takes `**kwargs` but averages over its batch has its losses added up over the "
        "micro-batches: loss and gradient grow with the accumulation.",
        "A loss that is a mean is weighted by its targets, whatever the signature says.",
        "tests/pytorch/trainer/test_transformers_models.py::test_any_split_gives_the_same_gradient",
    ),
    "mean over micro-batches": Defect(
        "Micro-batches of different size count alike where the model returns a mean.",
        "Every sample counts alike.",
        "tests/pytorch/trainer/test_splits.py::test_a_module_that_returns_a_mean",
    ),
    "hidden non-finite loss": Defect(
        "A loss that is not finite is logged as the mean of those since the last row, 0.0 where there are none, while "
        "the weights are lost.",
        "Values that are not finite are counted in the log, and logged as such if there are no others; "
        "`nonfinite_policy` can skip, rewind or raise.",
        "tests/pytorch/trainer/test_nonfinite.py",
    ),
    "global generator": Defect(
        "The order of samples grouped by length is drawn from the global generator: it depends on what else drew.",
        "The order follows from the seed and the epoch alone.",
        "tests/pytorch/data/test_samplers.py",
    ),
    "draws of the loader": Defect(
        "What a collator or a sampler without a seed draws from the global generator depends on the loader: it draws a "
        "number for each pass, and reads a batch ahead of the model's dropout.",
        "Loaders draw from generators of their own and read no batch ahead of its step, so that a resumed run sees the "
        "same masks and orders. With a seed (`DataCollatorForLanguageModeling(seed=...)`) the masks are the same.",
        "tests/pytorch/trainer/test_masked_language.py",
    ),
    "best step": Defect(
        "`best_global_step` stays unset where the best evaluation was not also saved.",
        "`best_global_step` is the step of `best_metric`.",
        "tests/pytorch/trainer/test_strategies.py",
    ),
    "finished run": Defect(
        "A run that was complete trains one more step when it is resumed: `global_step` passes `max_steps`.",
        "A complete run is left as it is.",
        "tests/pytorch/trainer/test_resume.py::test_a_finished_run_trains_no_more",
    ),
    "other batch size": Defect(
        "The place in the data is counted in batches: with another batch size samples are skipped or seen twice.",
        "The place is counted in samples.",
        "tests/pytorch/trainer/test_resume_matrix.py",
    ),
    "smoothing needs a config": Defect(
        "`label_smoothing_factor` with a plain module: AttributeError, for it has no `config`.",
        "Any module whose output has logits is smoothed.",
        "tests/pytorch/trainer/test_any_model.py::test_label_smoothing_without_a_config",
    ),
    "first row dropped": Defect(
        "Predictions of a model that returns bare logits lose their first row of every batch.",
        "One row for each sample.",
        "tests/pytorch/trainer/test_any_model.py::test_bare_logits_predict_one_row_per_sample",
    ),
    "unknown callback": Defect(
        "A callback that the checkpoint knows nothing of: KeyError at the next save after a resume.",
        "A new callback begins as it is.",
        "tests/pytorch/trainer/test_resume.py::test_added_and_removed_callbacks_do_not_matter",
    ),
    "no older checkpoint": Defect(
        "A newest checkpoint that was cut short ends the resume with an error, though a good one lies beside it.",
        "The newest good checkpoint is taken, with a warning that names what is passed over.",
        "tests/pytorch/trainer/test_resume.py::test_a_damaged_newest_checkpoint_is_passed_over",
    ),
}


# what a run folder holds here and not there: not defects, but named all the same
ADDED_FILES = {
    "manifest.json": "sizes and hashes of a checkpoint's files",
    "progress.json": "the place in the data, counted in samples",
    "journal.bin": "what each step saw, for `paceline replay`",
    "run.json": "versions, arguments and machine of the run",
    "packages.txt": "the packages of the environment",
    "report.html": "the page of the run: curves, evaluations, settings",
}


@dataclass(frozen=True)
class Configuration:
    """One run. `model`, `data` and `extras` name things in parity_runs.py.

    `written_by`: the run goes on from a checkpoint of that library, written at step `stop`; `options_before` are those
    of the run that wrote it. `differences`: where the two runs differ -> the defect of theirs that is the reason.
    """

    model: str
    data: str
    options: dict[str, Any] = field(default_factory=dict)
    extras: tuple[str, ...] = ()
    written_by: str = ""
    stop: int = 0
    options_before: dict[str, Any] = field(default_factory=dict)
    differences: dict[str, str] = field(default_factory=dict)


BEST = {"load_best_model_at_end": True, "metric_for_best_model": "score", "save_total_limit": 2}
BY_STEPS = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 4}
BY_EPOCHS = {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"}
SAVED = {"save_strategy": "steps", "save_steps": 4}
GENERATES = {"predict_with_generate": True, "generation_max_length": 8, "generation_num_beams": 2}

TRAINED = ("log: grad_norm", "log: loss", "log: train_loss", "weights")


def because(defect: str, *places: str) -> dict[str, str]:
    """The places that differ for one reason."""
    return dict.fromkeys(places, defect)


CONFIGURATIONS: dict[str, Configuration] = {
    "epochs": Configuration("gpt2", "language"),
    "a classifier": Configuration("bert", "classes"),
    "fractional epochs": Configuration("gpt2", "language", {"num_train_epochs": 1.5, "eval_strategy": "epoch"}),
    "max_steps": Configuration("gpt2", "language", {"max_steps": 15, "eval_strategy": "steps", "eval_steps": 4}),
    "steps as ratios": Configuration(
        "gpt2",
        "language",
        {
            "eval_strategy": "steps",
            "eval_steps": 0.25,
            "logging_steps": 0.1,
            "warmup_steps": 0.1,
            "logging_first_step": True,
        },
    ),
    "evaluation at the start and delayed": Configuration(
        "gpt2", "language", {"eval_strategy": "epoch", "eval_on_start": True, "eval_delay": 2, "max_grad_norm": 0.1}
    ),
    "accumulation": Configuration("gpt2", "language", {"gradient_accumulation_steps": 3, "weight_decay": 0.1, **SAVED}),
    "accumulation with a partial window": Configuration("gpt2", "language", {"gradient_accumulation_steps": 4}),
    "accumulation, all tokens as labels": Configuration(
        "gpt2",
        "all tokens",
        {"gradient_accumulation_steps": 2},
        ("pad",),
        differences=because("first target", *TRAINED),
    ),
    "accumulation of a classifier": Configuration(
        "bert",
        "classes",
        {"gradient_accumulation_steps": 2},
        differences=because("sum over accumulation", *TRAINED),
    ),
    "accumulation of a plain module": Configuration(
        "plain",
        "ragged classes",
        {"gradient_accumulation_steps": 2},
        differences=because("mean over micro-batches", *TRAINED),
    ),
    "a plain module, batches of one size": Configuration("plain", "classes", {"eval_strategy": "epoch"}),
    "evaluate and save by steps": Configuration("bert", "classes", BY_STEPS),
    "evaluate and save by epochs": Configuration("bert", "classes", BY_EPOCHS),
    "best model, by steps": Configuration("bert", "classes", {**BY_STEPS, "logging_steps": 3, **BEST}, ("scores",)),
    "best model, by epochs": Configuration("bert", "classes", {**BY_EPOCHS, **BEST}, ("scores",)),
    "save_strategy best": Configuration(
        "bert", "classes", {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best", **BEST}, ("scores",)
    ),
    "best metric without checkpoints": Configuration(
        "bert",
        "classes",
        {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "score"},
        ("scores",),
        differences=because("best step", "state: best_global_step"),
    ),
    "early stopping": Configuration(
        "bert", "classes", {**BY_STEPS, "save_steps": 2, **BEST}, ("scores", "early stopping")
    ),
    "label smoothing": Configuration("gpt2", "language", {"label_smoothing_factor": 0.2, "eval_strategy": "epoch"}),
    "label smoothing of ragged rows": Configuration(
        "gpt2", "ragged language", {"label_smoothing_factor": 0.2, "gradient_accumulation_steps": 2}, ("pad",)
    ),
    "evaluation of ragged rows": Configuration(
        "gpt2",
        "ragged language",
        {"eval_strategy": "epoch"},
        ("pad",),
        differences=because("mean of means", "log: eval_loss"),
    ),
    "group by length": Configuration(
        "gpt2",
        "ragged language",
        {"train_sampling_strategy": "group_by_length"},
        ("pad",),
        differences=because("global generator", *TRAINED, "log: total_flos", "state: total_flos"),
    ),
    "group by length, seeded alike": Configuration(
        "gpt2",
        "ragged language",
        {"train_sampling_strategy": "group_by_length", "num_train_epochs": 1},
        ("pad", "seeded order"),
    ),
    "masks of the global generator": Configuration(
        "gpt2",
        "language",
        {"num_train_epochs": 1},
        ("masks",),
        differences=because("draws of the loader", *TRAINED),
    ),
    "an own sampler without a seed": Configuration(
        "bert",
        "classes",
        {"num_train_epochs": 1},
        ("unseeded order",),
        differences=because("draws of the loader", *TRAINED),
    ),
    "label smoothing of a plain module": Configuration(
        "plain",
        "ragged classes",
        {"label_smoothing_factor": 0.2},
        differences=because("smoothing needs a config", "error there: AttributeError"),
    ),
    "a model that returns bare logits": Configuration(
        "bare",
        "classes",
        {"max_steps": 4, "label_names": ["labels"], "remove_unused_columns": False},
        ("loss function", "predict"),
        differences=because("first row dropped", "rows predicted"),
    ),
    "warmup, cosine, clipping, decay": Configuration(
        "bert",
        "ragged classes",
        {"warmup_steps": 0.2, "lr_scheduler_type": "cosine", "max_grad_norm": 0.5, "weight_decay": 0.1, **SAVED},
    ),
    "partial last batch": Configuration("bert", "ragged classes"),
    "drop last": Configuration("bert", "ragged classes", {"dataloader_drop_last": True}),
    "data seed": Configuration("bert", "classes", {"data_seed": 3}),
    "sgd, constant rate": Configuration(
        "bert", "classes", {"optim": "sgd", "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3}
    ),
    "adafactor": Configuration("bert", "classes", {"optim": "adafactor"}),
    "plateau": Configuration(
        "bert",
        "classes",
        {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": {"patience": 0},
            "eval_strategy": "steps",
            "eval_steps": 2,
            "metric_for_best_model": "loss",
        },
        differences=because("best step", "state: best_global_step"),
    ),
    "several evaluation sets": Configuration("bert", "classes", {**BY_STEPS, "save_steps": 2}, ("evaluation sets",)),
    "iterable data": Configuration("bert", "stream", {"max_steps": 9, **SAVED}),
    "metrics batch by batch": Configuration(
        "bert", "classes", {"eval_strategy": "epoch", "batch_eval_metrics": True}, ("batch metrics",)
    ),
    "tokens counted": Configuration("gpt2", "language", {"include_num_input_tokens_seen": "all"}),
    "a loss that is not finite": Configuration(
        "poisoned",
        "ragged classes",
        {"logging_steps": 1},
        differences=because(
            "hidden non-finite loss", "log: grad_norm", "log: loss", "log: train_loss", "log: nonfinite_steps only here"
        ),
    ),
    "seq2seq with generation": Configuration(
        "t5",
        "translations",
        {**BY_EPOCHS, **GENERATES},
        ("seq2seq", "text metrics"),
        differences=because("mean of means", "log: eval_loss"),
    ),
    "seq2seq of BART": Configuration(
        "bart",
        "translations",
        {**BY_EPOCHS, **GENERATES, "gradient_accumulation_steps": 2},
        ("seq2seq", "text metrics"),
        differences=because("sum over accumulation", *TRAINED, "files: model.safetensors", "log: eval_recall")
        | because("mean of means", "log: eval_loss"),
    ),
    "resume from theirs": Configuration(
        "gpt2", "language", {"gradient_accumulation_steps": 2, **SAVED, "save_steps": 2}, written_by="theirs", stop=4
    ),
    "resume from ours": Configuration(
        "gpt2", "language", {"gradient_accumulation_steps": 2, **SAVED, "save_steps": 2}, written_by="ours", stop=4
    ),
    "resume within an epoch": Configuration("bert", "classes", SAVED, written_by="theirs", stop=4),
    "resume with another batch size": Configuration(
        "bert",
        "classes",
        {**SAVED, "per_device_train_batch_size": 8},
        written_by="theirs",
        stop=4,
        options_before={"per_device_train_batch_size": 4},
        differences=because(
            "other batch size",
            "events",
            "files: checkpoint-6 only there",
            "files: checkpoint-8 only here",
            "log: rows",
            "state: global_step",
            "state: max_steps",
            "state: total_flos",
            "weights",
        ),
    ),
    "resume of a finished run": Configuration(
        "bert",
        "classes",
        {**SAVED, "max_steps": 8},
        written_by="theirs",
        stop=8,
        differences=because(
            "finished run",
            "events",
            "files: checkpoint-9 only there",
            "log: rows",
            "state: epoch",
            "state: global_step",
            "state: total_flos",
        ),
    ),
    "resume with a callback that is new": Configuration(
        "bert",
        "classes",
        {**BY_STEPS, "save_steps": 2, "metric_for_best_model": "loss", "load_best_model_at_end": True},
        ("early stopping",),
        written_by="theirs",
        stop=4,
        options_before={"load_best_model_at_end": False},
        differences=because("unknown callback", "error there: KeyError"),
    ),
    "resume where the newest checkpoint is cut short": Configuration(
        "bert",
        "classes",
        {**SAVED, "save_steps": 2},
        ("cut short",),
        written_by="theirs",
        stop=4,
        differences=because("no older checkpoint", "error there: SafetensorError"),
    ),
    "resume of a stream": Configuration("bert", "stream", {"max_steps": 10, **SAVED}, written_by="theirs", stop=4),
}
