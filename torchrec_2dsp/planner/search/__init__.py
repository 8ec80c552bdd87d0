"""The search by cost, on arrays and without process groups; see `torchrec_2dsp.planner`."""
