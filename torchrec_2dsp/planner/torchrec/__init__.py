"""Parts for TorchRec's own planner: proposers, partitioners, an enumerator and stats.

The search by cost is `planner.search`; its results reach TorchRec's planner through the proposers.
"""
