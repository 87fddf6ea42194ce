from paceline.callbacks.printer import PrinterCallback, readable_logs
from paceline.core.state import TrainerControl, TrainerState


def test_prints_the_row_and_leaves_it_alone(capsys):
    logs = {"loss": 0.123456, "total_flos": 1e9, "step": 3}
    PrinterCallback().on_log(None, TrainerState(), TrainerControl(), logs=logs)
    assert capsys.readouterr().out == "{'loss': 0.1235, 'step': 3}\n"
    assert list(logs) == ["loss", "total_flos", "step"]


def test_a_row_has_numbers_and_its_step(capsys):
    PrinterCallback().on_log(None, TrainerState(global_step=40), TrainerControl(), logs={"loss": 5.19312})
    assert capsys.readouterr().out == "{'loss': 5.193, 'step': 40}\n"


def test_one_process_per_machine_prints(capsys):
    PrinterCallback().on_log(None, TrainerState(is_local_process_zero=False), TrainerControl(), logs={"loss": 1.0})
    PrinterCallback().on_log(None, TrainerState(), TrainerControl(), logs=None)
    assert capsys.readouterr().out == ""


def test_long_strings():
    readable = readable_logs({"text": "x" * 11, "short": "x" * 10}, max_str_len=10)
    assert readable["short"] == "x" * 10
    assert "11 characters" in readable["text"]
