"""Imports that ranks need, done once by the process from which they are forked.

A rank's own imports would take one core for a second, and each pool has up to eight ranks.
"""

import pytest as pytest
import torch.distributed.checkpoint as checkpoint
import torchrec.distributed.model_parallel as model_parallel
import torchrec.distributed.train_pipeline as train_pipeline

import torchrec_2dsp as tdsp
from tests.support import loops as loops, models as models, oracle as oracle, parity as parity
from torchrec_2dsp.programs.cli import app as app

LOADED = (checkpoint, model_parallel, train_pipeline)
"""Modules that are needed, but not imported by name in this project."""
PUBLIC = [getattr(tdsp, name) for name in tdsp.__all__]
"""Public names are loaded when they are first used: now."""
