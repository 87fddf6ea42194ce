"""The diagnosis of an example, where it would train: `python example_doctor.py NAME FOLDER` writes `found.json`."""

from __future__ import annotations

import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import paceline

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def main(name: str, folder: Path) -> None:
    def train(trainer: paceline.Trainer, *args: Any, **kwargs: Any) -> None:
        begin = time.perf_counter()
        found = {**trainer.doctor().to_dict(), "seconds": time.perf_counter() - begin}
        (folder / "found.json").write_text(json.dumps(found))
        raise SystemExit

    paceline.Trainer.train = train  # type: ignore[method-assign]
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [name, "--use_cpu", "--output_dir", str(folder)]
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
