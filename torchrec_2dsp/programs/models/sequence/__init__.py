"""A sequence recommender: a causal transformer over a user's items, which predicts the next one.

    ids of items, and of negatives  --one lookup in one table-->  vectors
    vectors of items     --transformer-->  what comes next, at each position
    what comes next  x   vectors of the true next items and of the negatives  -->  sampled softmax

The lookup is an `EmbeddingCollection`'s; everything after it is a `LayerStack`.
"""
