"""Benchmarks: train one model in several ways, interleaved, and compare their speed.

A *contestant* is a way to train: TorchRec's, this package's, or a *ceiling*, which repeats another
one with collectives that cost nothing. Each has its own process on every rank, so one that
crashes or hangs affects no other. Only one computes at a time:

```text
             torchrun's ranks: rank 0        rank 1   ...        agree over the store (process)
                                 |              |
   contestant "stock":      Worker ------- Worker                its own process groups
   contestant "exact_2d":   (stopped)      (stopped)
   ...
   round 1: stock, ceiling, exact_2d     one block of steps each, in a random order
   round 2: exact_2d, stock, ceiling     ...
   then each is traced once, and judged by its losses
```

In the order of the data: ``config`` names contestants, ``program`` runs them, ``process`` holds
their processes, ``worker`` is one contestant on one rank, ``contestants`` builds its model,
``replay`` is a ceiling's backend, ``machine`` reads the operating system, ``tracing`` profiles
steps, ``judge`` compares losses with the reference, ``results`` is the JSON. From that,
``statistics`` computes figures, ``tables`` and ``labels`` show them, and ``page`` and ``plots``
write files.

Traces are read by ``programs/traces``; training itself is in ``programs/train``, not here.
"""
