"""The sections `augmentation`, `calibration` and `ensemble` of a job: how its predictions are made."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.args.errors import UnsupportedOption
from paceline.cli.config import JobConfig
from paceline.cli.errors import UsageError, check_keys, suggest
from paceline.cli.job_data import Splits
from paceline.cli.references import read_reference
from paceline.core.outputs import PredictionOutput
from paceline.predictions.augmentation import AugmentedOutput, TestTimeAugmentation
from paceline.predictions.calibration import FILE_NAME, METHODS, Calibrator, fit_calibration
from paceline.predictions.ensemble import REDUCTIONS, EnsembleOutput, ensemble_predict
from paceline.predictions.image_transforms import NAMED

if TYPE_CHECKING:
    from paceline.pytorch.trainer import Trainer
    from paceline.tensorflow.trainer import TFTrainer

SECTIONS = ("augmentation", "calibration", "ensemble")
AUGMENTATION_KEYS = ("transforms", "inverse", "reduce", "outputs", "weights", "include_original")
ENSEMBLE_KEYS = ("members", "combine", "weights", "outputs")
AUGMENTED = "eval_augmented"  # prefix of the metrics with augmentation, beside those without


@dataclass(frozen=True)
class JobPredictions:
    """The way in which a job predicts; at most one of these is set.

    Attributes:
        augmentation: test-time augmentation of the evaluation and the prediction stage.
        calibration: method of the calibration that is fitted on the evaluation data.
        ensemble: arguments of `ensemble_predict`, of the prediction stage; `members` are folders or patterns of them.
    """

    augmentation: TestTimeAugmentation | None = None
    calibration: str | None = None
    ensemble: Mapping[str, Any] | None = None

    @property
    def is_evaluated(self) -> bool:
        """True if the evaluation stage has results that a run without the section does not have."""
        return self.augmentation is not None or self.calibration is not None


def read_predictions(config: JobConfig, stages: Sequence[str]) -> JobPredictions:
    """Reads the sections of a job, before anything is loaded.

    Raises:
        UsageError: a section is invalid, two contradict each other, or no stage uses one.
    """
    given = [name for name in SECTIONS if config.get(name) is not None]
    if len(given) > 1:
        raise UsageError(
            f"{' and '.join(given)} exclude each other: each makes predictions of its own kind. Leave one of them out"
        )
    if not given:
        return JobPredictions()
    name, value = given[0], config.get(given[0])
    if config.get("members") is not None and name != "augmentation":
        raise UsageError(f"{name} and members exclude each other: predict in a job of one model")
    if name == "ensemble" and "do_predict" not in stages:
        raise UsageError("ensemble: only the stage do_predict uses it: give --do_predict too, or leave it out")
    readers: dict[str, Callable[[Any], Any]] = {
        "augmentation": read_augmentation,
        "calibration": read_calibration,
        "ensemble": read_ensemble,
    }
    try:
        return JobPredictions(**{name: readers[name](value)})
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name}: {error}") from error


def read_augmentation(value: Any) -> TestTimeAugmentation:
    """Returns the augmentation of a list of transforms, or of a mapping with the arguments."""
    settings = {"transforms": value} if isinstance(value, str | list) else dict(value)
    check_keys("augmentation", settings, AUGMENTATION_KEYS)
    transforms = settings.get("transforms")
    transforms = [transforms] if isinstance(transforms, str) else transforms
    if not isinstance(transforms, list) or not transforms:
        raise UsageError(f"augmentation.transforms: expected a list of transforms, not {transforms!r}")
    settings["transforms"] = [named(f"augmentation.transforms[{i}]", each) for i, each in enumerate(transforms)]
    inverse = settings.get("inverse")
    if isinstance(inverse, list):
        settings["inverse"] = [
            None if each is None else function_of(f"augmentation.inverse[{i}]", each) for i, each in enumerate(inverse)
        ]
    return TestTimeAugmentation(**settings)


def named(where: str, value: object) -> Any:
    """Returns a transform: a known name, or the function of a reference."""
    if isinstance(value, str) and value in NAMED:
        return value
    if isinstance(value, str) and ":" not in value:
        raise UsageError(
            f"{where}: {value!r} is neither package.module:name nor a known transform{suggest(value, NAMED)}"
        )
    return function_of(where, value)


def function_of(where: str, value: object) -> Callable[[Any], Any]:
    """Returns the function, or the instance of a class, that a reference names."""
    reference = read_reference(where, value)
    if reference is None:
        raise UsageError(f"{where}: {value!r} is not of the form package.module:name")
    found: Callable[[Any], Any] = reference.bind()
    return found


def read_calibration(value: Any) -> str:
    """Returns the method."""
    settings = {"method": value} if isinstance(value, str) else dict(value)
    check_keys("calibration", settings, ("method",))
    method = settings.get("method")
    if method not in METHODS:
        raise UsageError(f"calibration: {method!r} is not one of {', '.join(METHODS)}{suggest(str(method), METHODS)}")
    return str(method)


def read_ensemble(value: Any) -> dict[str, Any]:
    """Returns the arguments of `ensemble_predict`, with a list of members."""
    settings = {"members": value} if isinstance(value, str | list) else dict(value)
    check_keys("ensemble", settings, ENSEMBLE_KEYS)
    members = settings.get("members")
    members = [members] if isinstance(members, str) else members
    if not isinstance(members, list) or not members or not all(isinstance(each, str) and each for each in members):
        raise UsageError(f"ensemble.members: expected folders or patterns such as runs/a/snapshots/*, not {members!r}")
    combine = settings.get("combine", "probabilities")
    if combine not in REDUCTIONS:
        raise UsageError(f"ensemble.combine: {combine!r} is not one of {', '.join(REDUCTIONS)}")
    return {**settings, "members": members}


def check_data(
    predictions: JobPredictions, trainer: Trainer | TFTrainer, splits: Splits, stages: Sequence[str]
) -> None:
    """Checks before training that there is what the sections need.

    Raises:
        UsageError: data or metrics are missing.
    """
    if predictions.calibration is not None and (splits.eval is None or isinstance(splits.eval, Mapping)):
        found = "none" if splits.eval is None else f"several: {', '.join(splits.eval)}"
        raise UsageError(f"calibration: it is fitted on the one evaluation set of the data, and there are {found}")
    if predictions.augmentation is not None and "do_predict" not in stages and trainer.compute_metrics is None:
        raise UsageError(
            "augmentation: the evaluation computes only the loss, which is that of the samples as they are: give "
            "metrics or compute_metrics, or --do_predict"
        )
    if predictions.ensemble is not None and predictions.ensemble.get("weights") == "fit" and splits.eval is None:
        raise UsageError("ensemble.weights: 'fit' needs an evaluation set, on which they are fitted")


def evaluate_augmented(predictions: JobPredictions, trainer: Trainer | TFTrainer) -> dict[str, float]:
    """Returns the metrics of the evaluation set with augmentation; empty without it, or without other metrics.

    Raises:
        UsageError: the predictions cannot be combined.
    """
    if predictions.augmentation is None or trainer.compute_metrics is None:
        return {}
    try:
        return trainer.evaluate(metric_key_prefix=AUGMENTED, augmentation=predictions.augmentation)
    except (ValueError, UnsupportedOption) as error:
        raise UsageError(str(error)) from error


def fit(method: str, trainer: Trainer | TFTrainer, data: Any) -> Calibrator:
    """Fits a calibration on labeled data.

    Raises:
        UsageError: the predictions are not those of a classifier of one class per sample.
    """
    output = trainer.predict(data, metric_key_prefix="eval")
    try:
        return fit_calibration(output.predictions, output.label_ids, method)
    except (TypeError, ValueError, ImportError) as error:
        raise UsageError(f"calibration: {error}") from error


def load_calibration(method: str, folder: Path | None) -> Calibrator:
    """Reads the calibration beside a model.

    Raises:
        UsageError: there is none, it is damaged, or it is of another method.
    """
    remedy = "fit it by the stage do_eval of the finished run, without --do_predict alone"
    if folder is None or not (folder / FILE_NAME).is_file():
        raise UsageError(f"calibration: there is no {FILE_NAME} beside the weights of {folder}: {remedy}")
    try:
        found = Calibrator.load(folder)
    except ValueError as error:
        raise UsageError(f"calibration: {error}") from error
    if found.method != method:
        raise UsageError(f"calibration: {folder / FILE_NAME} is of the method {found.method!r}: {remedy}")
    return found


def find_members(config: JobConfig, members: Sequence[str]) -> list[str]:
    """Returns the folders that names and patterns stand for, in the configuration's folder or the current one.

    Raises:
        UsageError: there is none for one of them.
    """
    found: list[str] = []
    for name in members:
        path = config.find_file(name)
        matches = [str(path)] if path is not None else []
        for base in (config.folder, Path.cwd()):
            matches = matches or sorted(glob.glob(str(Path(glob.escape(str(base)), Path(name).expanduser()))))
        kept = [each for each in matches if Path(each).is_dir()]
        if not kept:
            raise UsageError(f"ensemble.members: there is no folder {name}")
        found += kept
    return found


def check_members(predictions: JobPredictions, config: JobConfig, output_dir: Path, stages: Sequence[str]) -> None:
    """Checks before training that the members of an ensemble exist, except those that this run may make.

    Raises:
        UsageError: a folder is missing, or a pattern has no match.
    """
    for name in (predictions.ensemble or {}).get("members", ()):
        if "do_train" not in stages or not may_become(config, name, output_dir):
            find_members(config, [name])


def may_become(config: JobConfig, pattern: str, output_dir: Path) -> bool:
    """Returns True if `pattern` may match a folder in `output_dir`, or the folder itself."""
    own = Path(os.path.realpath(output_dir)).parts
    for base in (config.folder, Path.cwd()):
        parts = Path(os.path.realpath(base / Path(pattern).expanduser())).parts
        if len(parts) >= len(own) and all(map(fnmatch, own, parts)):
            return True
    return False


def make_predictions(
    predictions: JobPredictions, config: JobConfig, trainer: Trainer | TFTrainer, splits: Splits
) -> PredictionOutput | EnsembleOutput:
    """Predicts on the test set as the sections say.

    Raises:
        UsageError: a member is missing, or predictions cannot be combined.
    """
    try:
        if predictions.ensemble is None and predictions.augmentation is None:
            return trainer.predict(splits.test)
        if predictions.ensemble is None:
            return trainer.predict(splits.test, augmentation=predictions.augmentation)
        settings = dict(predictions.ensemble)
        members = find_members(config, settings.pop("members"))
        held_out = splits.eval if settings.get("weights") == "fit" else None
        return ensemble_predict(members, splits.test, trainer, held_out=held_out, **settings)
    except (ValueError, UnsupportedOption) as error:
        raise UsageError(str(error)) from error


def rows_of(output: PredictionOutput | EnsembleOutput) -> dict[str, Any]:
    """Returns what augmentation or an ensemble adds to the predictions: one number for each sample."""
    if isinstance(output, EnsembleOutput):
        return {"disagreement": output.disagreement, "spread": output.spread}
    return {"agreement": output.agreement, "spread": output.spread} if isinstance(output, AugmentedOutput) else {}
