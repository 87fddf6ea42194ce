"""`paceline demo`: the jobs text and digits, with their corpus, tokenizer, model and plots."""
