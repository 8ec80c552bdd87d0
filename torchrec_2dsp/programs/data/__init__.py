"""Batches of samples: synthetic ones, which any rank draws from a seed, and those from log files.

A training program sees its data as a `Dataset`, which all ranks open together. Logs in files are in
``logs``; `negatives` adds negative items to any dataset's samples.
"""
