"""The program behind `torchrec-2dsp train`: one model, one data stream, several runs."""
