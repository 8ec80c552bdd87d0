"""One pass over a log that counts how often each row is used.

Ranks read different blocks; their counts are added up. What is counted, and what follows from it,
is in ``torchrec_2dsp.access``.
"""
