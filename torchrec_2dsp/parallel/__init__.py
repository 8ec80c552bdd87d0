"""The wrapper around the user's model."""
