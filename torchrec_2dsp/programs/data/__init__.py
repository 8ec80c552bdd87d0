"""Batches of samples: synthetic ones, which any rank makes from a seed, and those of logs in files.

A training program knows its data as a `Dataset`. Logs in files have a folder, ``logs``.
"""
