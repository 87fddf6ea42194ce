import pytest

from paceline.core.outputs import BestRun, EvalLoopOutput, EvalPrediction, PredictionOutput, TrainOutput


@pytest.mark.parametrize(
    ("extra", "expected"),
    [({}, (1, 2)), ({"inputs": 3}, (1, 2, 3)), ({"losses": 4}, (1, 2, 4)), ({"inputs": 3, "losses": 4}, (1, 2, 3, 4))],
)
def test_eval_prediction_unpacks_into_the_parts_that_exist(extra, expected):
    prediction = EvalPrediction(predictions=1, label_ids=2, **extra)
    assert tuple(prediction) == expected
    assert len(prediction) == len(expected)
    assert [prediction[index] for index in range(len(expected))] == list(expected)
    with pytest.raises(IndexError):
        prediction[len(expected)]


def test_fields():
    assert EvalLoopOutput._fields == ("predictions", "label_ids", "metrics", "num_samples")
    assert PredictionOutput._fields == ("predictions", "label_ids", "metrics")
    assert TrainOutput._fields == ("global_step", "training_loss", "metrics")
    assert BestRun("1", 0.5, {"lr": 1.0}) == ("1", 0.5, {"lr": 1.0}, None)
