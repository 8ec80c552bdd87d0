"""Layers of the dense part that run on one rank after the other, as a pipeline.

What cuts a `LayerStack` into stages, orders their work and runs it lives here. Who holds what, for
two ranks whose batches are cut into two micro-batches together:

    tables: each rank looks up its own batch      layers 0 and 1      layers 2 and 3, loss
    rank 0: samples 0 to 5   --inputs-->          rank 0: 0 to 4  -->  rank 1: 0 to 4
    rank 1: samples 6 to 9   --inputs-->          rank 0: 5 to 9  -->  rank 1: 5 to 9
                                                        <--gradients--
    losses and gradients of the inputs go back to the rank whose samples they are of
"""
