"""What runs where, as plain data: searched by `planner`, run by `shard`."""
