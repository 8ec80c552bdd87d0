"""The programs behind `torchrec-2dsp bench`: several ways to train one model, side by side."""
