"""How bytes look on the wire, and one movement of them at a time."""
