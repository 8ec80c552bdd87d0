"""The program behind `torchrec-2dsp train-study`: runs with several seeds, compared."""
