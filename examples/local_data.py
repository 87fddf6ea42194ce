"""Data for the examples, made here: small tasks that a small model learns in a minute, and a tokenizer for them.

Every function returns a `DatasetDict` with the splits `train` and `validation`, the same at each call.
"""

import importlib
import random
from collections.abc import Callable, Iterable
from typing import Any

from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast


def words(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


PEOPLE = words("anna ben clara david emma felix greta henry ida jonas lena max nora oscar paula robin")
CITIES = words("paris berlin madrid rome vienna oslo dublin prague lisbon athens")
FIRMS = words("acme globex initech umbrella hooli vandelay wonka stark")
JOBS = words("baker doctor driver farmer lawyer nurse painter pilot teacher waiter")


def make(sample: Callable[[random.Random], dict[str, Any]], num_train: int, num_validation: int) -> DatasetDict:
    """Two splits of samples, all of them different, so that the evaluation is of samples that were not trained on."""
    draw, found = random.Random(0), dict[str, dict[str, Any]]()
    while len(found) < num_train + num_validation:
        row = sample(draw)
        found[repr(row)] = row
    rows = list(found.values())
    draw.shuffle(rows)  # common samples are found first
    splits = {"train": rows[:num_train], "validation": rows[num_train:]}
    return DatasetDict({name: Dataset.from_list(split) for name, split in splits.items()})


def train_tokenizer(texts: Iterable[str], vocab_size: int = 2000) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer learned from `texts`: lower case, `[CLS] text [SEP]`, `[CLS] text [SEP] pair [SEP]`."""
    tokens = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(tokens.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    named = {f"{name}_token": token for name, token in tokens.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="[CLS]", eos_token="[SEP]", model_max_length=512, **named
    )


def reviews() -> DatasetDict:
    """`text` and `label`: short reviews, good or bad; "not" turns an opinion round, so that words alone mislead."""
    things = words("soup bread wine room service music view price film book")
    opinions = {
        "good": words("great lovely perfect tasty charming excellent"),
        "bad": words("awful boring dirty bland noisy terrible"),
    }

    def sample(draw: random.Random) -> dict[str, Any]:
        label, is_turned = draw.choice(["good", "bad"]), draw.random() < 0.4
        said = {"good": "bad", "bad": "good"}[label] if is_turned else label
        verb = draw.choice(["was", "is", "seemed"]) + (" not" if is_turned else "")
        text = f"the {draw.choice(things)} {verb} {draw.choice(opinions[said])}"
        aside = f"we went to {draw.choice(CITIES)} with {draw.choice(PEOPLE)}"
        return {"text": ", ".join(draw.sample([text, aside], 2)) + ".", "label": label}

    return make(sample, 2000, 400)


def named_entities() -> DatasetDict:
    """`tokens` and `tags` (B-PER, B-LOC, B-ORG, I-ORG, O): names that are told apart by what stands around them."""
    ambiguous = words("paris madison jordan austin lincoln sydney")

    def sample(draw: random.Random) -> dict[str, Any]:
        person = draw.choice(PEOPLE + ambiguous)
        parts = [
            [(person, "B-PER"), (draw.choice(["lives", "stays", "works"]), "O"), ("in", "O")],
            [(draw.choice(CITIES + ambiguous), "B-LOC")],
            [("for", "O"), (draw.choice(FIRMS + CITIES), "B-ORG"), (draw.choice(["ltd", "group"]), "I-ORG")],
        ]
        pairs = [pair for part in parts[: draw.choice([2, 3])] for pair in part] + [(".", "O")]
        return {"tokens": [word for word, _ in pairs], "tags": [tag for _, tag in pairs]}

    return make(sample, 400, 300)


def documentation() -> DatasetDict:
    """`text`: the paragraphs of Python's language reference, which every Python carries; a tenth is held out."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    paragraphs = dict.fromkeys(" ".join(text.split()) for name in sorted(topics) for text in topics[name].split("\n\n"))
    kept = [text for text in paragraphs if len(text) > 40]
    splits = {"train": [text for i, text in enumerate(kept) if i % 10], "validation": kept[::10]}
    return DatasetDict({name: Dataset.from_dict({"text": texts}) for name, texts in splits.items()})


def questions() -> DatasetDict:
    """`context`, `question` and `answers` (`text`, `answer_start`), as in SQuAD: facts about one person."""

    def sample(draw: random.Random) -> dict[str, Any]:
        person = draw.choice(PEOPLE)
        facts = {
            f"where was {person} born?": ("was born in", draw.choice(CITIES)),
            f"what is the job of {person}?": ("works as a", draw.choice(JOBS)),
            f"who employs {person}?": ("is employed by", draw.choice(FIRMS)),
        }
        asked, context, start = draw.choice(list(facts)), "", 0
        for question, (relation, answer) in draw.sample(list(facts.items()), len(facts)):
            context += f"{person} {relation} {answer}. "
            start = len(context) - len(answer) - 2 if question == asked else start
        return {
            "context": context.strip(),
            "question": asked,
            "answers": {"text": [facts[asked][1]], "answer_start": [start]},
        }

    return make(sample, 2000, 400)


def reports() -> DatasetDict:
    """`document` and `summary`: a report of a match among small talk, and what it comes down to."""

    def sample(draw: random.Random) -> dict[str, Any]:
        winner, loser = draw.sample(CITIES, 2)
        small_talk = [
            f"the weather was {draw.choice(['mild', 'rainy', 'cold'])}.",
            f"{draw.choice(PEOPLE)} sang before the match.",
            f"tickets were {draw.choice(['cheap', 'sold out'])}.",
        ]
        sport = draw.choice(words("football handball hockey"))
        news = draw.choice([f"in {sport} {winner} beat {loser}.", f"{loser} lost to {winner} in {sport}."])
        document = " ".join(draw.sample([*draw.sample(small_talk, 2), news], 3))
        return {"document": document, "summary": f"{sport}: {winner} wins over {loser}"}

    return make(sample, 3000, 300)


def sentences() -> DatasetDict:
    """`en` and `de`: English sentences with their German; articles and endings follow gender and case."""
    masculine, feminine = {"dog": "m Hund", "man": "m Mann"}, {"cat": "f Katze", "woman": "f Frau"}
    nouns = {**masculine, **feminine, "child": "n Kind", "horse": "n Pferd"}
    adjectives = {"small": "klein", "old": "alt", "brown": "braun", "wild": "wild"}
    verbs = {"sees": "sieht", "hears": "hört", "finds": "findet", "follows": "verfolgt"}
    forms = {"m": ("der", "e"), "f": ("die", "e"), "n": ("das", "e")}
    forms_of_object = {**forms, "m": ("den", "en")}

    def phrase(draw: random.Random, forms: dict[str, tuple[str, str]]) -> tuple[str, str]:
        noun, german = draw.choice(list(nouns.items()))
        adjective, german_adjective = draw.choice(list(adjectives.items()))
        gender, german = german.split()
        article, ending = forms[gender]
        if draw.random() < 0.5:
            return f"the {noun}", f"{article} {german}"
        return f"the {adjective} {noun}", f"{article} {german_adjective}{ending} {german}"

    def sample(draw: random.Random) -> dict[str, Any]:
        subject, target = phrase(draw, forms), phrase(draw, forms_of_object)
        verb, german_verb = draw.choice(list(verbs.items()))
        return {"en": f"{subject[0]} {verb} {target[0]}", "de": f"{subject[1]} {german_verb} {target[1]}"}

    return make(sample, 3000, 300)


def digits() -> DatasetDict:
    """`image` (8 x 8, 0 to 16) and `label`: the handwritten digits that scikit-learn carries, every fifth held out."""
    data = importlib.import_module("sklearn.datasets").load_digits()
    every = range(len(data.target))
    parts = {"train": [i for i in every if i % 5], "validation": [i for i in every if i % 5 == 0]}
    return DatasetDict(
        {
            name: Dataset.from_dict({"image": data.images[rows].tolist(), "label": [str(i) for i in data.target[rows]]})
            for name, rows in parts.items()
        }
    )
