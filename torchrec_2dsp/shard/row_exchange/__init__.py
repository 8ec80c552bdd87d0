"""Row exchange: each distinct row of a batch travels once, whatever the number of samples.

    rank 0 needs rows 3, 8, 3, 9 -> asks owners for 3, 8, 9 -> gets 3 rows -> pools its samples
    rank 1 needs rows 8, 8, 1    -> asks owners for 1, 8    -> gets 2 rows -> pools its samples

In the order of a batch: `needed_rows` finds the distinct rows, `requests` asks their owners,
`per_host` asks once per host, `kernel` looks rows up for others, `exchange` fetches them, `pooling`
makes bags or sequences of them. `arrangement` says where rows lie in their shards.
"""
