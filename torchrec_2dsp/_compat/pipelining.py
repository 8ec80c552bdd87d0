"""Adapters to torch.distributed.pipelining: its orders of work, and its split backward."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import get_schedule_class


class _StageNumber:
    """The numbers of a stage that torch's schedules ask for."""

    submod = None
    group = None
    device = torch.device("cpu")

    def __init__(self, number: int, num_stages: int, num_ranks: int) -> None:
        self.stage_index, self.num_stages = number, num_stages
        self.group_rank, self.group_size = 0, num_ranks
        self.is_first, self.is_last = number == 0, number == num_stages - 1
        self.stage_index_to_group_rank: dict[int, int] = {}


def order_of_work(
    name: str, num_ranks: int, stages_per_rank: int, num_micro_batches: int
) -> list[list[tuple[str, int, int]]]:
    """Return each rank's work order by a torch schedule with several stages per rank.

    Returns:
        For each rank the kind ("F", "B", "I" or "W"), stage and micro-batch of each piece of work.
    """
    num_stages = num_ranks * stages_per_rank
    stages = [_StageNumber(number, num_stages, num_ranks) for number in range(stages_per_rank)]
    schedule: Any = get_schedule_class(name)(
        stages,  # type: ignore[arg-type]
        num_micro_batches,
        loss_fn=lambda *_: None,  # type: ignore[arg-type,return-value]
    )
    by_rank = schedule.pipeline_order
    return [list(_pieces(by_rank[rank])) for rank in range(num_ranks)]


def _pieces(actions: Any) -> Iterator[tuple[str, int, int]]:
    for action in actions:
        if action is None:
            continue
        if action.sub_actions is not None:
            yield from _pieces(action.sub_actions)
        elif action.computation_type.value in ("F", "B", "I", "W"):
            yield action.computation_type.value, action.stage_index, action.microbatch_index


def input_gradients(
    output: torch.Tensor,
    gradient: torch.Tensor,
    inputs: list[torch.Tensor],
    params: list[torch.nn.Parameter],
) -> Any:
    """Compute only the inputs' gradients, and leave them in their ``grad``.

    Returns:
        The groups that `weight_gradients` needs; they lack parameters if no input is reached.
    """
    # torch finds the parameters' graph nodes through views, which need gradients enabled. It cuts
    # outputs off from their graphs, so it gets a copy.
    with torch.enable_grad():
        _, groups = stage_backward_input([output.clone()], [gradient], list(inputs), iter(params))
    return _disjoint(groups)


def _disjoint(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join groups with a common node, whose parameters torch would count twice."""
    joined: list[tuple[set[Any], dict[Any, Any]]] = []
    for group in groups:
        params = set(group["params"])
        nodes = dict(zip(group["intermediates"], group["grads"], strict=True))
        apart = []
        for other in joined:
            if nodes.keys().isdisjoint(other[1]):
                apart.append(other)
            else:
                params |= other[0]
                nodes |= other[1]
        joined = [*apart, (params, nodes)]
    return [
        {"params": params, "intermediates": list(nodes), "grads": list(nodes.values())}
        for params, nodes in joined
    ]


def weight_gradients(params: list[torch.nn.Parameter], groups: Any) -> None:
    """Compute the gradients that `input_gradients` left out, and add them to ``grad``."""
    with torch.enable_grad():
        stage_backward_weight(iter(params), groups)
