"""Clicks in files: from Parquet and text files to batches, in constant memory.

    files  --blocks of lines, row groups-->  source  --the rows of this rank-->  columns
    columns  --hash, vocabulary, logarithm-->  samples  --a thread ahead-->  batches

A *block* is the unit of reading: some megabytes of lines, or some thousand rows of a row group. How
many rows each block has is known before reading begins, so that every rank finds the rows of any
batch by arithmetic: global batch n is rows [n*B, (n+1)*B) of the stream, for every number of ranks.

Synthetic clicks are in the room above. How a model is trained on batches is in ``programs.train``.
"""
