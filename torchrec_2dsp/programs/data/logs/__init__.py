"""Logs in files: from Parquet, text and other formats to batches, in constant memory.

    files  --by all ranks, once-->  Parquet  --the blocks of this rank-->  columns
    columns  --hash, vocabulary, logarithm-->  samples  --a thread ahead-->  batches

Files are read in *blocks*: a row group with a few megabytes of lines, or some thousand rows from a
larger one. Parquet footers give each block's row count, so every rank finds any batch's rows by
arithmetic: global batch n is the stream's rows [n*B, (n+1)*B), for every number of ranks. In the
order in which data flows:

    config, sections     the config section ``[data]``
    files, text          file systems and formats; lines, and malformed ones among them
    conversion, source   to Parquet, and from it; the held-out rows
    ids, encoder         strings to ids, rows to samples
    batches              a rank's rows, in order, as batches; the dataset of rows
    sequence_data        the dataset of users' sequences

Synthetic clicks are in the parent package, training on batches in ``programs.train``.
"""
