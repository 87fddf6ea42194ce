"""What survives a restart: the files of a checkpoint, as a user of transformers knows them."""
