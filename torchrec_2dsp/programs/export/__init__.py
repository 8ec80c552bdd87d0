"""Trained models become files that serve without this package.

``source`` finds the checkpoint and the config of a run, and ``trained`` builds the model with the
checkpoint's weights. How a kind of model answers requests is a `ServedModel`: ``scores``,
``next_items`` and ``own`` have them, and ``kinds`` chooses. ``serving`` makes int8 tables and
scripts, ``quality`` compares models on held-out batches, ``folder`` and ``encoding`` say what is
written, and ``export`` does all of it:

```text
checkpoint --> unsharded model, float32 --> int8 tables (TorchRec) --> TorchScript: model.pt
                        |                                                    |
                        +------- the same held-out batches, compared --------+--> export.json
```

``requests`` and ``histories`` make requests of raw values of a log.

This is a program, not a part of the library: which tensors a server gives, and what it gets, is
known of the models that the training program trains and of no other. The one part that isn't,
weights read into an unsharded model, is `load_weights` in ``parallel/checkpoint``.
"""
