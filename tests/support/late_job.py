"""One of two processes hangs while it reads its data."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from small_models import Classifier, classification, make_trainer


class Slow(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        if os.environ["RANK"] == "1" and index == 7:
            time.sleep(100)
        return super().__getitem__(index)


if __name__ == "__main__":
    options = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 2}
    make_trainer(Path(sys.argv[1]), Classifier(), Slow(classification(40)), ddp_timeout=12, **options).train()
