"""What things cost on this machine: measured, and calculated from what was measured."""
