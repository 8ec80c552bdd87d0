"""The world that torchrun started: joined and left in order."""
