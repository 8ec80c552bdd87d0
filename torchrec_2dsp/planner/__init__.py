"""Search a plan for one sharding group, in which replicas and their sync have a cost."""
