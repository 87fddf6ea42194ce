"""`paceline train CONFIG.yaml`: builds a Trainer from a file and runs it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.args.coercion import TRUE_WORDS
from paceline.args.training import TrainingArguments
from paceline.callbacks.reporters.jsonl import JSONLReporter
from paceline.cli import job_predictions
from paceline.cli.config import JobConfig
from paceline.cli.display import say, silent
from paceline.cli.errors import UsageError, load_part
from paceline.cli.init import PLACEHOLDER
from paceline.cli.job_data import Splits, check_files, split_settings
from paceline.cli.job_metrics import MetricError, read_metrics
from paceline.cli.jobs import (
    Job,
    Say,
    Show,
    asks_to_resume,
    bring_job,
    is_evaluated,
    is_finished,
    is_of_tensorflow,
    kept,
    named_checkpoint,
    note_evaluated,
    open_job,
    resume_of,
    train_job,
    training_metrics,
    write_results,
)
from paceline.cli.references import put_on_path, read_reference
from paceline.core.lineage import REPORT_FILE
from paceline.core.outputs import PredictionOutput
from paceline.core.results import read_results
from paceline.predictions.calibration import FILE_NAME as CALIBRATION_FILE
from paceline.predictions.calibration import Calibrator
from paceline.predictions.ensemble import EnsembleOutput
from paceline.tensorflow.arguments import TFTrainingArguments

if TYPE_CHECKING:
    from paceline.pytorch.trainer import Trainer
    from paceline.tensorflow.trainer import TFTrainer


# framework -> the command in job.json
COMMANDS = {"torch": "train", "tf": "train --framework tf"}
STAGES = ("do_train", "do_eval", "do_predict")
# sections that must not change between starts, so that checkpoints fit; other sections may change
IDENTITY = ("model", "tokenizer", "data", "preprocess", "trainer", "members")
PREDICTIONS_FILE = "predictions.npz"


def run(config: JobConfig, fresh: bool, say: Say = say) -> int:
    """Trains, evaluates and predicts by the configuration; returns the exit code.

    Raises:
        UsageError: the configuration is invalid.
    """
    put_on_path(config.folder, Path.cwd())
    framework = load_framework(config)
    stages = choose_stages(config.arguments)
    args = make_arguments(config)
    if config.framework == "tf":
        framework.connect(args)
    check_references(config)
    predictions = job_predictions.read_predictions(config, stages)
    folder = Path(str(args.output_dir))
    with framework.in_turn(args) as is_first:  # of several processes
        say = say if is_first else silent
        job, resume = open_folder(config, args, predictions, stages, fresh and is_first, say)
    length = {"max_steps": args.max_steps, "num_train_epochs": args.num_train_epochs}
    if stages == ("do_train", "do_eval") and resume is None and is_finished(job, length):
        show_finished(job, args, say)
        if is_evaluated(job) and not predictions.is_evaluated:
            return 0
        stages = ("do_eval",)
    announce(config, args, job, stages, say)
    trainer, splits = framework.build_trainer(config, args)
    check_splits(splits, args, stages, config.arguments)
    job_predictions.check_data(predictions, trainer, splits, stages)
    keep_log(trainer)
    if "do_train" in stages:
        note_settings(job, config, args)
        try:
            code = train_job(trainer, job, length, say, resume)
        except (*framework.REFUSALS, MetricError) as error:
            raise UsageError(str(error)) from error
        if code:
            return code
        drop_calibration(job)
        save_training(trainer, splits, job, "do_eval" in stages)
        source: Path | None = folder
    else:
        source = load_weights(trainer, job, resume, say)
        if "do_eval" in stages:
            evaluate(trainer, job, source)
    calibrator = calibrator_of(predictions, trainer, splits, stages, job, source, say)
    if "do_eval" in stages and (metrics := job_predictions.evaluate_augmented(predictions, trainer)):
        report(trainer, job_predictions.AUGMENTED, metrics)
    if "do_predict" in stages:
        predict(job_predictions.make_predictions(predictions, config, trainer, splits), calibrator, trainer, say)
    show_places(folder, args, say, is_trained="do_train" in stages)
    return 0


def open_folder(
    config: JobConfig,
    args: TrainingArguments,
    predictions: job_predictions.JobPredictions,
    stages: Sequence[str],
    fresh: bool,
    say: Say,
) -> tuple[Job, str | bool | None]:
    """Opens the output folder. Returns the job in it, and the checkpoint that the user named, if any.

    Raises:
        UsageError: the folder, or the checkpoint, is not of this job.
    """
    folder = Path(str(args.output_dir))
    identity = {name: config.get(name) for name in IDENTITY if config.get(name) is not None}
    bring_job(args, fresh, say)
    job_predictions.check_members(predictions, config, folder, stages)
    resume = resume_of(args)
    check_checkpoint(config.framework, named_checkpoint(resume))
    return open_job(folder, COMMANDS[config.framework], identity, fresh=fresh, say=say, resume=resume), resume


def announce(config: JobConfig, args: TrainingArguments, job: Job, stages: Sequence[str], say: Say) -> None:
    """Says where everything goes."""
    resumes = f", where {job.again} resumes" if "do_train" in stages else ""
    say(f"paceline train {config.path.name}: everything goes to {args.output_store or job.folder}/{resumes}")


def note_settings(job: Job, config: JobConfig, args: TrainingArguments) -> None:
    """Keeps what `rebuild` and a later start need in the settings of a job."""
    job.settings["arguments"] = args.to_sanitized_dict()
    given = kept(config.arguments)
    job.settings["given"] = {"path": str(config.path), "sections": config.sections, "arguments": given}


def show_places(folder: Path, args: TrainingArguments, say: Say, is_trained: bool) -> None:
    """Reports where the results are."""
    saved = "Model, metrics, log and run.json are" if is_trained else "The results are"
    say(f"\n{saved} saved to {folder}/")
    if (folder / REPORT_FILE).is_file():
        say(f"The curves: {folder / REPORT_FILE} (opens in a browser)")
    if args.output_store is not None:
        say(f"and, as soon as this command has ended, in {args.output_store}/")


def load_framework(config: JobConfig) -> Any:
    """Imports the module that builds a Trainer for the job's framework; the other framework is not imported.

    Raises:
        UsageError: the framework is not installed.
    """
    hint = "; a job of TensorFlow: give --framework tf" if config.framework == "torch" else ""
    return load_part(f"paceline.cli.train_{config.framework}", hint)


def check_references(config: JobConfig) -> None:
    """Reports wrong names before anything is moved, loaded or computed.

    Raises:
        UsageError: a metric, an object or a file of the configuration does not exist.
    """
    if config.get("metrics") is not None:
        read_metrics(config.get("metrics"))
    check_model(config)
    check_files(config)
    for name, value in config.sections.items():
        if name == "members":
            continue
        entries = enumerate(value) if name == "callbacks" else [(None, value)]
        for i, entry in entries:
            reference = read_reference(name if i is None else f"{name}[{i}]", entry)
            if reference is not None and name == "preprocess":
                reference = split_settings(reference)[0]
            if reference is not None:
                reference.check()


def check_model(config: JobConfig) -> None:
    """Refuses the placeholder of `paceline init`, which would be looked for on the hub.

    Raises:
        UsageError: the model has not been named.
    """
    section = config.get("model")
    name = section.get("path") if isinstance(section, Mapping) else section
    if name == PLACEHOLDER and config.find_file(PLACEHOLDER) is None:
        raise UsageError(f"model: replace {PLACEHOLDER} by the folder of a model, or by its name on the hub")


def check_checkpoint(framework: str, checkpoint: Path | None) -> None:
    """Refuses a named checkpoint of TensorFlow in a job of torch; TFTrainer refuses the reverse.

    Raises:
        UsageError: the checkpoint is a TensorFlow checkpoint.
    """
    if framework == "torch" and checkpoint is not None and is_of_tensorflow(checkpoint):
        raise UsageError(f"resume_from_checkpoint: {checkpoint} is a TensorFlow checkpoint: give --framework tf")


def choose_stages(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the stages that are switched on; if there is none, training and evaluation unless switched off."""
    given = [name for name in STAGES if name in arguments]
    switched_on = tuple(name for name in given if str(arguments[name]).strip().lower() in TRUE_WORDS)
    return switched_on or tuple(name for name in ("do_train", "do_eval") if name not in given)


def check_splits(splits: Splits, args: TrainingArguments, stages: Sequence[str], given: Mapping[str, Any]) -> None:
    """Checks before training that there is data for every stage.

    Raises:
        UsageError: a split is missing.
    """
    found = ", ".join(splits.given())
    if "do_train" in stages and splits.train is None:
        raise UsageError(f"data: there is no training split (found: {found})")
    evaluates = "do_eval" in stages and ("do_eval" in given or "do_train" not in stages)
    if splits.eval is None and ("do_train" in stages and str(args.eval_strategy) != "no"):
        raise UsageError(
            f"eval_strategy={str(args.eval_strategy)!r}: the data has no evaluation split (found: {found}); give "
            "data.eval or data.eval_fraction, return (train, eval) from a factory, or set eval_strategy: no"
        )
    if splits.eval is None and evaluates:
        raise UsageError(f"do_eval: the data has no evaluation split (found: {found})")
    if splits.test is None and "do_predict" in stages:
        raise UsageError(f"do_predict: the data has no test split (found: {found})")


def make_arguments(config: JobConfig) -> TrainingArguments:
    """Builds the arguments; the default `output_dir` is `runs/NAME`, where NAME is that of the configuration file.

    Raises:
        UsageError: an unknown option or an invalid value.
    """
    try:
        kind = TFTrainingArguments if config.framework == "tf" else TrainingArguments
        return kind(**{"output_dir": f"runs/{config.path.stem}", **config.arguments})
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


def keep_log(trainer: Trainer | TFTrainer) -> None:
    """Adds the reporter that writes `log.jsonl`, whatever `report_to` names."""
    if not any(isinstance(callback, JSONLReporter) for callback in trainer.callback_handler.callbacks):
        trainer.add_callback(JSONLReporter)


def rebuild(job: Job, overrides: Mapping[str, Any]) -> tuple[Trainer, Show | None]:
    """Rebuilds the Trainer of a run as at its start, with the formatter of a sample.

    Raises:
        UsageError: an object that the configuration names cannot be found or loaded.
    """
    given = job.settings["given"]
    config = JobConfig(Path(given["path"]), given["sections"], {**given["arguments"], **overrides})
    put_on_path(config.folder, Path.cwd())
    check_references(config)
    trainer, splits = load_framework(config).build_trainer(config, make_arguments(config))
    check_splits(splits, trainer.args, ("do_train",), {})
    decode = getattr(trainer.processing_class, "decode", None)
    if not callable(decode):
        return trainer, None

    def show(sample: Any) -> str:
        return str(decode(sample["input_ids"]))

    return trainer, show


def save_training(trainer: Trainer | TFTrainer, splits: Splits, job: Job, evaluates: bool) -> None:
    """Saves the model, the history and the metrics, and prints the metrics."""
    metrics = write_results(trainer, job, evaluates=evaluates and splits.eval is not None)
    if trained := training_metrics(trainer):
        trainer.log_metrics("train", trained)
    if metrics:
        trainer.log_metrics("eval", metrics)
    if trainer.args.push_to_hub:
        trainer._make_publisher().push_saved_model("End of training")


def evaluate(trainer: Trainer | TFTrainer, job: Job, source: Path | None) -> None:
    """Evaluates the weights of the folder `source`, without training."""
    report(trainer, "eval", trainer.evaluate())
    if job.finished is not None and source == job.folder:
        note_evaluated(job, True)


def report(trainer: Trainer | TFTrainer, split: str, metrics: dict[str, float]) -> None:
    """Saves metrics to a file and prints them: the file is written even if nothing can be printed any more."""
    trainer.save_metrics(split, metrics)
    trainer.log_metrics(split, metrics)


def drop_calibration(job: Job) -> None:
    """Removes the calibration that an earlier start of the job has fitted: it is of other weights."""
    if job.settings.pop("calibration", None) is not None:
        (job.folder / CALIBRATION_FILE).unlink(missing_ok=True)


def calibrator_of(
    predictions: job_predictions.JobPredictions,
    trainer: Trainer | TFTrainer,
    splits: Splits,
    stages: Sequence[str],
    job: Job,
    source: Path | None,
    say: Say,
) -> Calibrator | None:
    """Fits a calibration on the evaluation data, and stores it beside the model of the finished run.

    Args:
        stages: with the stage do_predict alone, a stored calibration is read.
        source: the folder of the weights; None without one.

    Returns:
        The calibration; None if the job asks for none.

    Raises:
        UsageError: the weights are not those of the finished run, there is no calibration, or the predictions cannot be
            calibrated.
    """
    method = predictions.calibration
    if method is None:
        return None
    if stages == ("do_predict",):
        return job_predictions.load_calibration(method, source)
    if source != job.folder:
        raise UsageError(
            f"calibration: it is stored beside the model of a finished run, and the weights are those of "
            f"{source or 'the model as configured'}: finish the run first, or leave it out"
        )
    calibrator = job_predictions.fit(method, trainer, splits.eval)
    if trainer.is_world_process_zero():
        calibrator.save(job.folder)
    job.settings["calibration"] = method
    job.write()
    say(f"Calibration, fitted on the evaluation data: {job.folder / CALIBRATION_FILE}")
    return calibrator


def load_weights(trainer: Trainer | TFTrainer, job: Job, resume: str | bool | None, say: Say) -> Path | None:
    """Loads weights for a job without training: from the named checkpoint, else the job's result or newest checkpoint.

    Without any of these the model's own weights are kept. Returns the folder of the weights, or None.
    """
    source = named_checkpoint(resume)
    if source is None and (resume is None or asks_to_resume(resume)):
        source = job.folder if job.finished is not None else job.checkpoint
    if source is None:
        say("The model is used as configured: nothing has been trained here yet.")
        return None
    say(f"Weights from {source}.")
    trainer._load_from_checkpoint(str(source))
    return source


def predict(
    output: PredictionOutput | EnsembleOutput, calibrator: Calibrator | None, trainer: Trainer | TFTrainer, say: Say
) -> None:
    """Saves the predictions of the test set and their metrics."""
    report(trainer, "test", output.metrics or {})
    kept = {**named_arrays("predictions", output.predictions), **named_arrays("label_ids", output.label_ids)}
    for name, rows in job_predictions.rows_of(output).items():
        kept |= named_arrays(name, rows)
    if calibrator is not None:
        kept["probabilities"] = calibrator(output.predictions)
    if isinstance(output, EnsembleOutput):
        say(f"An ensemble of {len(output.weights)}, weights {', '.join(f'{each:.3f}' for each in output.weights)}.")
    file = Path(str(trainer.args.output_dir)) / PREDICTIONS_FILE
    if trainer.is_world_process_zero():
        np.savez_compressed(file, allow_pickle=False, **kept)
    say(f"Predictions: {file}")


def named_arrays(name: str, value: object) -> dict[str, Any]:
    """Returns the arrays of predictions or labels by name: `name`, or `name_0` of a tuple, `name_KEY` of a mapping."""
    if isinstance(value, np.ndarray):
        return {name: value}
    if isinstance(value, tuple):
        value = dict(enumerate(value))
    items = value.items() if isinstance(value, Mapping) else ()
    return {f"{name}_{key}": array for key, array in items if isinstance(array, np.ndarray)}


def show_finished(job: Job, args: TrainingArguments, say: Say) -> None:
    """Reports the results of a finished run, and the options that have changed since."""
    assert job.finished is not None
    say(f"This run is finished: {job.finished['global_step']:,} steps, in {job.folder}/.  (--fresh starts over)")
    for name, value in read_results(job.folder).items():
        say(f"  {name} = {value}")
    before, now = job.settings.get("arguments") or {}, json.loads(json.dumps(args.to_sanitized_dict(), default=str))
    changed = [name for name in now if name in before and before[name] != now[name]]
    for name in changed:
        say(f"Not trained with {name} = {now[name]}: it was {before[name]}.")
