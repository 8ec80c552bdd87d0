"""The program behind `torchrec-2dsp train`: one model, one data stream, several runs.

In data-flow order: `config`, `program` (all runs and the loop), `sharded` (plan, model,
optimizers), `steps` (one step), `metrics` (losses and evaluations over all ranks), `record`
(figures), `results` (run folder, TensorBoard), `checkpoints`.

```text
          rank 0                                   rank 1
config    the same -------------------------------- the same
step t    its part of the global batch              its part
          ids, rows and gradients <---- library ---> (ModelParallel2D, or TorchRec alone)
report    losses --------- all-reduce ------------> losses
          watchers: display, run folder, TensorBoard
evaluate  held-out batches <----- lookups --------> held-out batches
          AUC over all scores <--- gather --------- scores
```

Models and their pipelines live in `programs.models`, data in `programs.data`, the display in
`programs.cli`, and the HTML page on a run in `programs.run_report`.
"""
