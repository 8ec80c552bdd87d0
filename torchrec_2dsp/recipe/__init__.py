"""What the programs share: a model to train, config files, and the ranks that run it."""
