"""A pipeline for the dense part: ranks that run layers one after another.

In data order: a `LayerStack` is cut into stages (`layer_stack`, `cut_stack`); a `Schedule` orders
their work; `links` sends samples to the stages and results back; `engine` runs a rank's stages;
`pipeline` is what a model calls; `held_layers` sums weight gradients over pipelines;
`moving_layers` recuts; `pipelined_dense` is the wrapper. Two ranks, whose batches are split into
two micro-batches together:

    tables: each rank looks up its own batch      layers 0 and 1      layers 2 and 3, loss
    rank 0: samples 0 to 5   --inputs-->          rank 0: 0 to 4  -->  rank 1: 0 to 4
    rank 1: samples 6 to 9   --inputs-->          rank 0: 5 to 9  -->  rank 1: 5 to 9
                                                        <--gradients--
    losses and input gradients go back to the samples' ranks
"""
