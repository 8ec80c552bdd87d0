"""Batches of samples: synthetic ones, which any rank draws from a seed, and those of logs in files.

A training program knows its data as a `Dataset`, which all ranks open together. Logs in files have
a folder, ``logs``; negatives are added to the samples of any dataset.
"""
