"""`leave_out_watchers`: ranks without what torch and TorchRec note for logs and profilers."""

import sys
from typing import Any


def leave_out_watchers() -> None:
    """Let TorchRec describe no calls for its log, and torch mark no spans for a profiler.

    Together they take a fifth of a training step.
    """
    from torch.autograd.profiler import record_function

    if torchrec_logger := sys.modules.get("torchrec.distributed.logger"):
        # It prints every module that is made.
        vars(torchrec_logger)["_get_input_from_func"] = lambda *args, **kwargs: ""
    unmarked: Any = record_function
    unmarked.__enter__ = lambda self: self
    unmarked.__exit__ = lambda self, *error: None
