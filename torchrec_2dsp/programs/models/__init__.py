"""The models that programs train, and how their plans, optimizers and pipelines follow a config."""
