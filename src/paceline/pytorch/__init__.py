"""PyTorch: the facades `Trainer` and `Seq2SeqTrainer`, a run of them, and the engine, data, models and strategies."""
