"""The model hub: a model card, pushes of the model and of checkpoints, through `huggingface_hub`."""
