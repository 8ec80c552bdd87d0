"""State of dense optimizers, which most of them make at their first step."""

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_2dsp.parallel.checkpoint.fit import Entries
from torchrec_2dsp.parallel.checkpoint.parts import DENSE, dense_params


def init_dense_state(
    model: DistributedModelParallel, optimizer: KeyedOptimizer, saved: Entries
) -> None:
    """Let optimizers that make their state at the first step make what is saved of it."""
    dense, existing = dense_params(model, optimizer), optimizer.state
    saved_keys = {name.rpartition(".")[0].removeprefix(f"{DENSE}.state.") for name in saved}
    missing = {key for key in dense if key in saved_keys and dense[key] not in existing}
    if not missing:
        return
    before = [(param, param.detach().clone(), param.grad) for param in dense.values()]
    for key, param in dense.items():
        param.grad = torch.zeros_like(param) if key in missing else None
    optimizer.step()
    with torch.no_grad():
        for param, value, grad in before:
            param.copy_(value)
            param.grad = grad
