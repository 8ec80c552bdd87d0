"""Row exchange: each distinct row of a batch travels once, however many samples use it.

    rank 0 needs rows 3, 8, 3, 9 -> asks owners for 3, 8, 9 -> gets 3 rows -> pools its samples
    rank 1 needs rows 8, 8, 1    -> asks owners for 1, 8    -> gets 2 rows -> pools its samples

In order: `requests` finds the batch's distinct rows and asks their owners (once per host, if
several ranks need them), `lookup.RowLookup` looks rows up for other ranks, and `exchange` fetches
them; `journey` carries rows that come early. `stages` moves rows within their shards before a read
or an update, and sends rows ahead of their step.
"""
