"""`TrainState`: what a run needs to resume, besides the model.

`state.py` assembles it. State of the whole run is stored once (`header`), a rank's state once
for each rank (`rank<N>.header`); both are JSON, with tensors beside it
(`values.py`). Checkpoints, not this state, hold weights and optimizer state.
"""
