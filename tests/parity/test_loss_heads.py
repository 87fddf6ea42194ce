"""Every head of the installed transformers, made tiny: 8 samples as 4 x 2 and as 2 x 4 against one batch of 8.

Loss and gradient are right, or the run warned and named the remedy, or it was refused; a head that is wrong in silence
fails the test. The slow test takes every STEP-th module and compares with docs/loss_heads.md; with
PACELINE_WRITE_DOCS=1 it takes all of them (some 20 minutes of one core) and writes the page.
"""

import logging
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import loss_heads
import pytest

transformers = pytest.importorskip("transformers")

PAGE = Path(__file__).parents[2] / "docs" / "loss_heads.md"
START, STEP = 3, 24  # of the modules; the slowest (FalconH1, Kimi-Linear, Perceiver ...) stand at other places
# some of each kind, by the module that holds them
SUBSET = {
    "bert": (
        "BertForMaskedLM BertForMultipleChoice BertForNextSentencePrediction BertForPreTraining "
        "BertForQuestionAnswering BertForSequenceClassification BertForTokenClassification BertLMHeadModel"
    ),
    "gpt2": "GPT2DoubleHeadsModel GPT2ForQuestionAnswering GPT2LMHeadModel",
    "llama": "LlamaForCausalLM LlamaForQuestionAnswering",
    "bart": "BartForConditionalGeneration BartForQuestionAnswering",
    "electra": "ElectraForPreTraining",
    "vit": "ViTForImageClassification",
    # its samples are coupled by the numbers of their images, which no look at the loss shows
    "hunyuan_vl": "HunYuanVLForConditionalGeneration",
    # its class is known for another loss, and its batch cannot be cut
    "musicgen_melody": "MusicgenMelodyForCausalLM",
    "detr": "DetrForObjectDetection",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "wav2vec2": "Wav2Vec2ForCTC",
}
WARNED = {
    "BertForPreTraining", "DetrForObjectDetection", "ElectraForPreTraining", "GPT2DoubleHeadsModel",
    "HunYuanVLForConditionalGeneration", "MusicgenMelodyForCausalLM",
}  # fmt: skip
NAMES = [(module, name) for module, names in SUBSET.items() for name in names.split()]
HEADING = """# Losses of the heads of transformers

Each head of the installed transformers is made tiny, trained and evaluated on 8 samples as 4 x 2 and as 2 x 4
(samples in a micro-batch x micro-batches), with targets of unequal number where it has a target per token, and with
images, sounds or boxes where it reads them and the test knows how. Loss and gradient are compared with those of the
model's own forward of all 8 at once, in double precision where it can. Dropout is off and batch norms are frozen.
Written by `PACELINE_WRITE_DOCS=1 pytest -m slow tests/parity/test_loss_heads.py`.

- **right**: loss, gradient and `eval_loss` are those of the whole batch;
- **warned**: they are not, and a warning said so and named `loss_weight`;
- **refused**: an error said so.

There is no fourth verdict.
"""
VERDICTS = ("right", "warned", "refused")
# the sections of the page after the table, by the verdict that they are of
SECTIONS = {
    "warned": "Warned",
    "refused": "Refused",
    "no loss": "Heads without a loss",
    "random": "Heads whose loss draws random numbers",
    "not made": "Heads that this test does not make",
}
REMARKS = {
    "no loss": "They return none, or refuse labels: transformers does not train them.",
    "random": "Noise, masks or sampled points: no two passes over the same batch give the same loss.",
    "not made": "They cannot be made tiny here, or no batch that the test knows fits.",
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[name for _, name in NAMES])
def test_a_head_is_right_or_warned_of(tmp_path: Path, module: str, name: str) -> None:
    kind = dict(loss_heads.head_classes([module]))[name]
    verdict, reason = loss_heads.examine(tmp_path, kind)
    assert verdict == ("warned" if name in WARNED else "right"), reason


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_no_head_is_wrong_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("paceline"), "propagate", False)
    writes = bool(os.environ.get("PACELINE_WRITE_DOCS"))
    found: dict[str, tuple[str, str]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = loss_heads.module_names()
        for name, kind in loss_heads.head_classes(modules if writes else modules[START::STEP]):
            found[name] = loss_heads.examine(tmp_path, kind)
    wrong = {name: reason for name, (verdict, reason) in found.items() if verdict == "wrong"}
    assert not wrong, "\n".join(f"{name}: {reason}" for name, reason in wrong.items())
    if writes:
        PAGE.write_text(make_page(found), encoding="utf-8")
    said = {name: read_page().get(name, "right") for name in found}
    seen = {name: verdict for name, (verdict, _) in found.items() if verdict in VERDICTS}
    # what can be made depends on the installed packages too
    assert len(seen) > 0.9 * sum(verdict in VERDICTS for verdict in said.values())
    assert seen == {name: verdict if (verdict := said[name]) in VERDICTS else seen[name] for name in seen}


def make_page(found: dict[str, tuple[str, str]]) -> str:
    """The page of these verdicts."""
    kinds: dict[str, Counter[str]] = {}
    for name, (verdict, _) in found.items():
        kind = "For" + name.rsplit("For", 1)[1] if "For" in name else "LMHead, DoubleHeads"
        kinds.setdefault(kind, Counter())[verdict] += 1
    rows = {kind: counts for kind, counts in kinds.items() if any(counts[verdict] for verdict in VERDICTS)}
    total = Counter(verdict for verdict, _ in found.values())
    tried = sum(total[verdict] for verdict in VERDICTS)
    lines = [HEADING, f"transformers {transformers.__version__}: {len(found)} heads, {tried} of them in the table.", ""]
    lines += ["| head | right | warned | refused |", "|---|---:|---:|---:|"]
    for kind in sorted(rows, key=lambda kind: (-sum(rows[kind][verdict] for verdict in VERDICTS), kind)):
        lines.append(f"| {kind} | " + " | ".join(str(rows[kind][verdict]) for verdict in VERDICTS) + " |")
    lines.append("| **all** | " + " | ".join(f"**{total[verdict]}**" for verdict in VERDICTS) + " |")
    for verdict, title in SECTIONS.items():
        reasons = {name: reason for name, (given, reason) in sorted(found.items()) if given == verdict}
        if reasons:
            lines += ["", f"## {title}", "", *section(verdict, reasons)]
    alone = [f"`{name}`" for name, (_, reason) in sorted(found.items()) if reason == loss_heads.TEXT_ALONE]
    lines += ["", "## Right with text alone", "", f"{len(alone)}. The test has no images or sounds that fit them.", ""]
    return "\n".join([*lines, ", ".join(alone) + ".", ""])


def section(verdict: str, reasons: dict[str, str]) -> list[str]:
    """The lines on the heads of a verdict: their names, by reason where they were not made."""
    lines = [f"{len(reasons)}. {REMARKS[verdict]}", ""] if verdict in REMARKS else []
    if verdict != "not made":
        return [*lines, ", ".join(f"`{name}`" for name in reasons) + "."]
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(f"`{name}`")
    for reason in sorted(names, key=lambda reason: (not reason.startswith("needs"), -len(names[reason]), reason)):
        lines.append(f"- {', '.join(names[reason])}: {reason}")
    return lines


def read_page() -> dict[str, str]:
    """The verdict of each head that the page names; the others are right."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    names = {verdict: re.findall(r"`(\w+)`(?=[,.:])", sections.get(title, "")) for verdict, title in SECTIONS.items()}
    return {name: verdict for verdict, found in names.items() for name in found}
