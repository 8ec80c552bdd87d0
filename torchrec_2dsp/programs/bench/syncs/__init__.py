"""`bench-sync`: what keeping copies of a table shard equal costs, without a model around it."""
