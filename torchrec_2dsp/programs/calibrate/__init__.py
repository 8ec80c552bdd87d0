"""The program behind `torchrec-2dsp calibrate`: machines are measured, constants are fitted."""
