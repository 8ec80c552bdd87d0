"""The program behind `torchrec-2dsp doctor`: whether an installation works, and what mends it."""
