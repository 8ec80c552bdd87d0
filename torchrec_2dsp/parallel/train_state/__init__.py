"""`TrainState`: what a run needs to go on, beside the model.

`state.py` puts it together. What belongs to the run as a whole is stored once (`header`), what
belongs to a rank is stored for each rank (`rank<N>.header`); both are JSON, with tensors beside it
(`values.py`). Weights and optimizer state aren't here: checkpoints have them.
"""
