"""Trained models become files that serve without this package.

``source`` finds the checkpoint and the config of a run, ``trained`` builds the model with the
checkpoint's weights, ``serving`` makes the inference model of it, ``quality`` compares the two on
held-out batches, ``folder`` says what is written, and ``export`` does all of it:

```text
checkpoint --> unsharded model, float32 --> int8 tables (TorchRec) --> TorchScript: model.pt
                        |                                                    |
                        +------- the same held-out batches, compared --------+--> export.json
```

This is a program, not a part of the library: which tensors a server gives, and what it gets, is
known of the models in ``programs/models`` and of no other. The one part that isn't, weights read
into an unsharded model, is `load_weights` in ``parallel/checkpoint``.
"""
