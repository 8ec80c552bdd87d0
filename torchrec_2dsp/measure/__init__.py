"""Measure machines, and find the constants behind the times."""
