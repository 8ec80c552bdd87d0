"""What things cost: a plan's step, from a calibration of the network and its machines."""
