"""Tests on a machine with a GPU and without network.

`bundle` packs an environment here, `unpack` unpacks it there, `queue` runs `jobs` there and goes
on where it ended, `speed` measures, and `page` writes docs/gpu.md about it all.
"""
