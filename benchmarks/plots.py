"""Draws a bar for each contender of a result file: the median over the rounds, with its range."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# benchmark -> key of a row, axis
PLOTS = {
    "step_overhead": ("us_per_step", "CPU time of a step beside the model, us"),
    "large_vocabulary": ("added_gb", "memory that a step adds, GB"),
    "ragged_text": ("tokens_per_second", "useful tokens per CPU second"),
    "memory_options": ("added_mb", "memory that a step adds, MB"),
    "gpt2_124m": ("tokens_per_second", "tokens per second"),
    "checkpoint_save": ("held_seconds", "training waits for a save, seconds"),
    "eval_memory": ("peak_mb_4n", "peak memory of an evaluation, MB"),
    "resume_time": ("seconds", "from the start of a resume to its first optimizer step, seconds"),
    "import_time": ("cpu_ms", "CPU time of an import, ms"),
    "tf_step_transformer": ("wall_ms", "a step with TensorFlow, ms"),
}
OURS, OTHERS = "#1f6feb", "#9aa4b2"  # legible on white and on black


def draw(name: str, rows: dict[str, dict[str, Any]], path: Path) -> None:
    """Writes the plot of one benchmark as SVG. The same rows give the same bytes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    key, axis = PLOTS[name]
    shown = {contender: row[key] for contender, row in rows.items() if row.get(key) is not None}
    names = list(shown)
    medians = [shown[contender]["median"] for contender in names]
    ranges = [
        [median - shown[contender]["min"] for contender, median in zip(names, medians, strict=True)],
        [shown[contender]["max"] - median for contender, median in zip(names, medians, strict=True)],
    ]
    colors = [OURS if "paceline" in contender or contender == "background" else OTHERS for contender in names]
    style = {"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False}
    with pyplot.rc_context({**style, "axes.spines.right": False}):
        figure, axes = pyplot.subplots(figsize=(7, 0.6 + 0.34 * len(names)), layout="constrained")
        axes.barh(names, medians, xerr=ranges, color=colors, ecolor="#57606a", capsize=2)
        axes.invert_yaxis()
        axes.set_xlabel(axis)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Title": axis})
        pyplot.close(figure)
