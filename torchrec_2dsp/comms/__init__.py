"""Process groups, collectives, and how ranks agree and tell each other of failures."""
