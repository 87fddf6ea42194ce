"""Lines of evaluations: the same number stands at the same place in line after line."""

from types import SimpleNamespace

from paceline.cli.display import EvaluationLines


def test_evaluations_are_aligned():
    lines = []
    display = SimpleNamespace(training_bar=SimpleNamespace(write=lines.append))
    shown = EvaluationLines({"eval_loss": "held out", "eval_accuracy": "accuracy"}, display)
    for step, loss, accuracy in ((43, 2.188, 0.7822), (1_000, 0.0077941, 1.0)):
        state = SimpleNamespace(global_step=step)
        shown.on_log(None, state, None, {"loss": loss})
        shown.on_evaluate(None, state, None, {"eval_loss": loss / 2, "eval_accuracy": accuracy})
    assert lines == [
        "step     43   training loss 2.188      held out 1.094      accuracy 0.7822",
        "step  1,000   training loss 0.007794   held out 0.003897   accuracy 1",
    ]
