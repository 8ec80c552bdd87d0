"""Measure the machines at hand, and fit the constants of the cost model.

```text
collectives, kernels --times--> fit --coefficients--> calibrate --> Calibration, a TOML file
```

``collectives`` times collectives, ``kernels`` times work on rows, both on all ranks at
once; ``fit`` is pure. Nothing here predicts.
"""
