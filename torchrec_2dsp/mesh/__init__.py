"""Rank arithmetic and the process groups that follow from it."""
