"""The program behind `torchrec-2dsp train`: one model, one data stream, several runs.

In the order of a run: `config`, `program` (every run, and its loop), `sharded` (plan, model,
optimizers), `steps` (one step), `metrics` (losses and evaluations over all ranks), `record` (the
figures), `results` (run folder, TensorBoard), `checkpoints`.

```text
          rank 0                                   rank 1
config    the same -------------------------------- the same
step t    its part of the global batch              its part
          ids, rows and gradients <---- library ---> (ModelParallel2D, or TorchRec alone)
report    losses --------- all-reduce ------------> losses
          watchers: display, run folder, TensorBoard
evaluate  held-out batches <----- lookups --------> held-out batches
          AUC of all scores <----- gather --------- scores
```

Models and their pipelines live in `programs.models`, data in `programs.data`; the display in
`programs.cli`; pages on a run's folder in `programs.run_report`.
"""
