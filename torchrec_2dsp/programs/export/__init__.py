"""Export trained models as files that serve without this package.

```text
checkpoint --source--> unsharded model, float32 --served--> int8 tables --> TorchScript: model.pt
                         |                                                    |
                         +------- the same held-out batches, compared --------+--> export.json
                                                  export
```

``kinds`` serves each kind of model as a `ServedModel`, ``export`` writes the folder, and
``requests`` makes requests of raw values of a log.

This is a program, not a part of the library: it knows the inputs and outputs of the models that the
training program trains, and no others. The one part that isn't bound to them, reading weights into
an unsharded model, is `load_weights` in ``parallel/checkpoint``.
"""
