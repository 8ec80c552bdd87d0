"""When and how replicas are made equal."""
