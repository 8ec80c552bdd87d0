"""Logs in files: from Parquet, text and other formats to batches, in constant memory.

    files  --by all ranks, once-->  Parquet  --the blocks of this rank-->  columns
    columns  --hash, vocabulary, logarithm-->  samples  --a thread ahead-->  batches

A *block* is the unit of reading: a row group that holds some megabytes of lines, or some thousand
rows of a larger one. Parquet's footers say how many rows each block has, so every rank finds the
rows of any batch by arithmetic: global batch n is rows [n*B, (n+1)*B) of the stream, for every
number of ranks. In the order in which data flows:

    config, sections     the section ``[data]`` of a config
    files, text          file systems and formats; lines, and which of them can't be read
    conversion, source   to Parquet, and from it; which rows are held out
    ids, encoder         texts to ids, rows to samples
    batches              rows of a rank, in their order, as batches
    table_data, sequence_data    the two kinds of datasets

Synthetic clicks are in the room above. How a model is trained on batches is in ``programs.train``.
"""
