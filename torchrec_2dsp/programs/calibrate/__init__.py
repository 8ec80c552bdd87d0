"""Calibration: measure the machines at hand, and fit the constants of the cost model.

```text
collectives, kernels --times--> fit --coefficients--> calibrate --> Calibration, a TOML file
```

``collectives`` times collectives and links, ``kernels`` times work on rows, both on all ranks at
once; ``fit`` is pure. Predictions from a calibration are made in `cost`, not here.
"""
