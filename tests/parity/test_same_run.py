"""The same run in `transformers.Trainer` and here: what differs is listed, with the defect of theirs that explains it.

The runs and the differences are in tests/support/parity_table.py, of which docs/parity.md is made.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers", minversion="5.23")

from cases import slow_but  # noqa: E402
from parity_runs import checkpoint_files, differences, make_both  # noqa: E402
from parity_table import ADDED_FILES, CONFIGURATIONS, DEFECTS  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
# of transformers, accelerate and what they import
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _one_process() -> Iterator[None]:
    yield
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()


FAST = (
    "a classifier",
    "fractional epochs",
    "accumulation of a plain module",
    "label smoothing",
    "group by length",
    "iterable data",
    "a loss that is not finite",
    "resume from theirs",
    "resume of a stream",
)


@pytest.mark.parametrize("name", slow_but(FAST, CONFIGURATIONS))
def test_the_same_run(tmp_path: Path, name: str) -> None:
    theirs, ours = make_both(tmp_path, name)
    found, listed = differences(tmp_path, theirs, ours), set(CONFIGURATIONS[name].differences)
    assert not found - listed, "differences that nothing explains"
    assert not listed - found, "differences that are listed, and are none any more"


def test_files_that_only_a_folder_of_ours_has(tmp_path: Path) -> None:
    make_both(tmp_path, "accumulation")
    names = {side: {Path(file).name for file in checkpoint_files(tmp_path / side)} for side in ("theirs", "ours")}
    beside = {path.name for path in (tmp_path / "ours").iterdir() if path.is_file()}
    more = (names["ours"] - names["theirs"] | beside) - {"uncommitted.diff"}  # of the repository that the tests run in
    assert more == set(ADDED_FILES)


def test_every_defect_is_met_and_has_a_test_of_what_happens_here() -> None:
    met = {defect for run in CONFIGURATIONS.values() for defect in run.differences.values()}
    assert met == set(DEFECTS)
    for defect in DEFECTS.values():
        file, _, test = defect.proof.partition("::")
        assert f"def {test or 'test_'}" in (ROOT / file).read_text("utf-8"), defect.proof


def test_the_page_is_made_of_the_tables() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "parity_page.py"), "--check"], check=False)
    assert done.returncode == 0, "docs/parity.md is behind tests/support/parity_table.py: run `make docs`"
