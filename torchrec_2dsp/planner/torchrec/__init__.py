"""Parts for TorchRec's own planner; its proposers use the search by cost."""
