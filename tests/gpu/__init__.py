"""Tests on a machine with a GPU and without network.

`bundle` packs an environment here, `unpack` unpacks it there, `queue` runs `jobs` there and
resumes where it stopped, `speed` measures, and `page` writes docs/gpu.md from the results.
"""
