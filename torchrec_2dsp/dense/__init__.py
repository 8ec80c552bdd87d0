"""Ways to run the dense part of a model: modules that a user puts between its layers.

`thresholded` leaves out the small numbers of an activation, where a model is split between ranks or
hosts. What tables look up is run by `shard`; how numbers look on the wire is up to `codecs`.
"""
