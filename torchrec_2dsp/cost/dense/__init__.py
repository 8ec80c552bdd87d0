"""What the dense part of a model takes, layer by layer, in each way to run it. Pure."""
