"""Peak memory and time of exporting a sharded checkpoint, beside assembling the whole model first.

A folder of torch.distributed.checkpoint is made, and exported in fresh processes: by `paceline export`, and by reading
all of it into one state dict that `safetensors` saves. Memory is the peak of the process's own (RssAnon) above what it
had after its imports.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from measure import (
    Measured,
    choose_contenders,
    make_parser,
    ratios,
    report_from_child,
    run_child,
    summarize,
    take_turns,
    target,
    write_result,
)

CONTENDERS = {"paceline export": "torch", "whole in memory": "torch"}
WIDTH, LAYERS = 1024, 48
LIMIT = 0.25


def main() -> None:
    parser = make_parser(__doc__ or "", rounds=3)
    parser.add_argument("--checkpoint", type=Path, help="of an earlier call; for its children")
    arguments = parser.parse_args()
    width, layers = (256, 8) if arguments.quick else (WIDTH, LAYERS)
    if arguments.child == "make":
        make(arguments.checkpoint, width, layers)
        report_from_child({})
        return
    if arguments.child:
        report_from_child(measure(arguments.child, arguments.checkpoint))
        return
    chosen = choose_contenders(CONTENDERS, arguments.contenders)
    rounds = 1 if arguments.quick else arguments.rounds
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        flags = ["--checkpoint", folder, *(["--quick"] if arguments.quick else [])]
        run_child(__file__, ["--child", "make", *flags])
        measured = take_turns(chosen, rounds, lambda name: run_child(__file__, ["--child", name, *flags]))
    share = ratios(measured, "peak_mb", "whole in memory")
    rows = {
        name: {
            **{key: summarize([each[key] for each in taken]) for key in taken[0]},
            "peak_of_whole": share.get(name),
        }
        for name, taken in measured.items()
    }
    model_mb = width * width * layers * 4 / 1e6
    own = rows.get("paceline export", {}).get("peak_mb", {}).get("median")
    write_result(
        arguments,
        "export",
        {
            "rows": rows,
            "settings": {"model_mb": model_mb, "largest_mb": width * width * 4 / 1e6, "tensors": layers},
            "targets": [target("peak memory of an export, of the model", own and own / model_mb, LIMIT, "x")],
        },
    )


def make(folder: Path, width: int, layers: int) -> None:
    """A model of so many square matrices, as `torch.distributed.checkpoint` stores it."""
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    torch.manual_seed(0)
    place = folder / "pytorch_model_fsdp_0"
    place.mkdir()
    state = {"model": {f"layers.{index}.weight": torch.randn(width, width) for index in range(layers)}}
    planner, writer = DefaultSavePlanner(), FileSystemWriter(place)
    planner.set_up_planner(state, None, True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).value()])


def own_memory() -> float:
    """RssAnon in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1e3
    raise SystemExit("this system tells no RssAnon")


class Peak:
    """The most memory while it is entered, looked at every 2 ms."""

    def __enter__(self) -> Peak:
        self.first = self.most = own_memory()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ends.wait(0.002):
            self.most = max(self.most, own_memory())

    def __exit__(self, *error: Any) -> None:
        self._ends.set()
        self._thread.join()


def measure(name: str, checkpoint: Path) -> Measured:
    """Export once."""
    from safetensors.torch import save_file

    import paceline.pytorch.checkpoint.shards  # torch.distributed.checkpoint, which both load late, has 45 MB
    import paceline.pytorch.checkpoint.streaming  # noqa: F401
    from paceline.cli.export import export
    from paceline.pytorch.checkpoint.fqn_state import read_whole_model

    with tempfile.TemporaryDirectory(dir=checkpoint.parent) as folder:
        start = time.perf_counter()
        with Peak() as peak:
            if name == "paceline export":
                export(checkpoint, Path(folder) / "out", max_shard_bytes=10**9)
            else:
                state = read_whole_model(checkpoint)
                assert state is not None
                save_file(state, Path(folder) / "model.safetensors")
        return {"peak_mb": peak.most - peak.first, "seconds": time.perf_counter() - start}


if __name__ == "__main__":
    main()
