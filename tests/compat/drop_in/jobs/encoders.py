"""sentence-transformers: a bi-encoder, a cross-encoder or a sparse encoder, named in the second argument."""

import random
import sys

from datasets import Dataset
from small_parts import EVALUATED, encoder_folder, run, sentences, settings
from transformers import BertForMaskedLM, BertForSequenceClassification, BertModel

kind = sys.argv[2]
source = random.Random(5)
pairs = {"sentence1": sentences(48, 1), "sentence2": sentences(48, 2), "label": [source.random() for _ in range(48)]}
data, held_out = Dataset.from_dict(pairs), Dataset.from_dict({name: rows[:8] for name, rows in pairs.items()})
options = settings(**EVALUATED)
if kind == "bi":
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator
    from sentence_transformers.losses import CosineSimilarityLoss

    model = SentenceTransformer(encoder_folder(BertModel), device="cpu")
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(**options),
        train_dataset=data,
        eval_dataset=held_out,
        loss=CosineSimilarityLoss(model),
        evaluator=EmbeddingSimilarityEvaluator(pairs["sentence1"][:8], pairs["sentence2"][:8], pairs["label"][:8]),
    )
elif kind == "cross":
    from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    model = CrossEncoder(encoder_folder(BertForSequenceClassification), num_labels=1, device="cpu")
    trainer = CrossEncoderTrainer(
        model=model,
        args=CrossEncoderTrainingArguments(**options),
        train_dataset=data,
        eval_dataset=held_out,
        loss=BinaryCrossEntropyLoss(model),
    )
else:
    from sentence_transformers import SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments
    from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss

    model = SparseEncoder(encoder_folder(BertForMaskedLM), device="cpu")
    inner = SparseMultipleNegativesRankingLoss(model)
    trainer = SparseEncoderTrainer(
        model=model,
        args=SparseEncoderTrainingArguments(**options),
        train_dataset=data.remove_columns("label"),
        eval_dataset=held_out.remove_columns("label"),
        loss=SpladeLoss(model, inner, document_regularizer_weight=1e-3, query_regularizer_weight=1e-3),
    )
run(trainer)
