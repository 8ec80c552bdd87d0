"""One plan for all ranks, or one error on all ranks."""

import pickle
from collections.abc import Callable

import torch.distributed as dist

from torchrec_2dsp.errors import MeshError, PlanError, TwoDError
from torchrec_2dsp.plan.plan2d import Plan2D


def group_or_world(pg: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """``pg``, or the group of all ranks.

    Raises:
        MeshError: there is neither.
    """
    pg = dist.group.WORLD if pg is None else pg
    if pg is None:
        raise MeshError(
            "torch.distributed is not initialised; call "
            "torch.distributed.init_process_group(...) first, or use plan(...)"
        )
    return pg


def plan_on_rank_0(make_plan: Callable[[], Plan2D], pg: dist.ProcessGroup) -> Plan2D:
    """What ``make_plan`` gives on rank 0 of ``pg``, on every rank: its plan or its error.

    An error that isn't one of this package becomes a `PlanError` that names its type. The
    ranks that only hear of the error raise one of the same type and text.

    Collectives:
        One broadcast of a pickled object from rank 0 of ``pg``.
    """
    planned: tuple[Plan2D, bytes] | None = None
    raised: TwoDError | None = None
    if dist.get_rank(pg) == 0:
        try:
            plan = make_plan()
            planned = plan, pickle.dumps(plan)
        except TwoDError as error:
            raised = error
        except Exception as error:
            raised = PlanError(f"planning failed on rank 0: {type(error).__name__}: {error}")
            raised.__cause__ = error
    message: list[bytes | tuple[type[TwoDError], str] | None] = [
        planned[1] if planned else (type(raised), str(raised)) if raised else None
    ]
    dist.broadcast_object_list(message, group=pg, group_src=0)
    if raised is not None:
        raise raised
    if planned is not None:
        return planned[0]
    heard = message[0]
    if isinstance(heard, tuple):
        kind, text = heard
        raise kind(text)
    assert heard is not None
    return pickle.loads(heard)
