"""Measure the current machines, and fit the cost model's constants.

```text
              clock: all ranks together, the slowest counts
                |
collectives, kernels --times--> fit --coefficients--> calibrate --> Calibration
                                                          ^             |
                                  not in the cache folder |             v
                                                        cache <------- kept
```

``collectives`` times collectives, ``kernels`` times work on rows, both on all ranks at once; how
much of it is a `Sampling` in ``clock``. ``fit`` is pure. ``cache`` is for starts without a file.
Nothing here predicts.
"""
