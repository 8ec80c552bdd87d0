"""Rows that travel while another batch computes.

`journey` takes the rows of a batch to the ranks that need them, and gradients back; `halves` are
the parts that may go early and those that may not; `row_prefetch` is what a pipeline talks to.
"""
