"""The checks, and their order. A new check is one function and one entry here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paceline.pytorch.doctor import inputs, labels, learning, structure
from paceline.pytorch.doctor.findings import ERROR, NOTE, Case, Diagnosis, Finding

Check = Callable[[Case], Iterator[Finding]]

# name -> check; those of the data run even if the model fails on it
OF_DATA: dict[str, Check] = {
    "classes": labels.find_wrong_classes,
    "label leak": labels.find_leaks,
    "padding": labels.find_padding_in_loss,
    "inputs": inputs.find_bad_inputs,
    "rows": inputs.find_bad_rows,
    "vocabulary": inputs.find_wrong_vocabulary,
    "length": inputs.find_long_inputs,
    "tied weights": structure.find_untied_weights,
}
OF_MODEL: dict[str, Check] = {
    "label range": labels.find_labels_out_of_range,
    "initial loss": structure.find_initial_loss,
    "targets": labels.find_wrong_shift,
    "gradients": structure.find_bad_gradients,
    "modes": structure.find_wrong_modes,
    "learning rate": learning.find_bad_rate,
    "one batch": learning.find_no_learning,
    "accumulation": learning.find_wrong_accumulation,
}


def examine(case: Case) -> Diagnosis:
    """Runs all checks; one that fails by itself is a note. After a failed pass only the data is checked."""
    found: list[Finding] = []
    done: list[str] = []

    def run(name: str, check: Check) -> list[Finding]:
        try:
            seen = [Finding(each.severity, each.seen, each.remedy, name) for each in check(case)]
        except Exception as error:  # user code
            text = (str(error).strip() or "no message").splitlines()[0][:200]
            return [Finding(NOTE, f"could not be checked: {type(error).__name__}: {text}", "", name)]
        done.append(name)
        return seen

    for name, check in OF_DATA.items():
        found += run(name, check)
    failed = run("loss", structure.find_failing_pass)
    found += failed
    if any(each.severity == ERROR for each in failed):
        found += run("label range", labels.find_labels_out_of_range)
    else:
        for name, check in OF_MODEL.items():
            found += run(name, check)
    return Diagnosis(tuple(found), tuple(done))
