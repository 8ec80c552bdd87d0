"""What things cost: a plan's step, from a calibration of the network and its machines."""

from torchrec_2dsp._compat.upstream_names import require_upstream

require_upstream()
