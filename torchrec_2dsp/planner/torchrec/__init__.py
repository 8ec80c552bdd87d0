"""Parts for TorchRec's own planner, which reach the search by cost through the proposers."""
