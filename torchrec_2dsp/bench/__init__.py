"""Several ways to train one model, side by side."""
