"""One of two processes hangs while it reads its data: in a long call, or stopped from outside.

Arguments: a folder, the rank that hangs, and "sleep" or "stop".
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from small_models import Classifier, classification, make_trainer

RANK, HOW = sys.argv[2:4]


class Slow(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        if os.environ["RANK"] == RANK and index == 8 - int(RANK):
            os.kill(os.getpid(), signal.SIGSTOP) if HOW == "stop" else time.sleep(100)
        return super().__getitem__(index)


if __name__ == "__main__":
    options = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 2}
    make_trainer(Path(sys.argv[1]), Classifier(), Slow(classification(40)), ddp_timeout=12, **options).train()
