"""How much ranks sent of their dense gradients, against the density that they were asked for."""

import math
from collections.abc import Iterator

import torch

from tests.fuzz.actions import actions_of, batches_of
from tests.fuzz.case import Case
from tests.fuzz.difference import Difference
from tests.fuzz.oracle import Expected
from tests.fuzz.seen import Seen
from tests.fuzz.weights import initial_dense
from torchrec_2dsp.dense.gradient_report import GradientReport


def check_density(case: Case, exact: Expected, seen: list[Seen]) -> int:
    """Check that no rank sent more than the density allows; how many elements all chose.

    Args:
        case: that was run.
        exact: says which steps send everything.
        seen: by each rank.
    """
    if not case.dense.leaves_out:
        return 0
    num_chosen, actions = 0, actions_of(case)
    for index in seen[0].sent:
        # DDP learns a static graph in the first step, where it adds up after each batch; otherwise
        # it does after the last one.
        is_in_parts = (
            index == 0 and case.dense.kind == "thresholded" and not case.dense.has_shortcut
        )
        num_sums = len(batches_of(case, actions[index])) if is_in_parts else 1
        for rank, of_rank in enumerate(seen):
            report, where = of_rank.sent[index], f"rank {rank} in action {index}"
            _check_report(case, report, index in exact.sent_whole, where)
            _check_chosen(case, report, num_sums, where)
            num_chosen += report.num_entries
        if seen[0].sent[index].num_thresholded_steps:
            allowed = num_sums * case.world_size
            _check_sum(case, seen[0].applied[index], allowed, f"action {index}")
    return num_chosen


def _check_report(case: Case, sent: GradientReport, is_whole: bool, where: str) -> None:
    """Check how a rank says that it has sent what one step gave."""
    is_thresholded = sent.num_thresholded_steps == 1
    has_choice = case.dense.kind == "thresholded" and case.dense.route == "auto"
    # Ranks that don't meet send nothing.
    num_steps = int(case.dense.kind == "thresholded" or not is_whole)
    if sent.num_steps != num_steps or (is_thresholded and is_whole):
        raise Difference("wrong report", f"{where}: {sent}")
    if not is_whole and not is_thresholded and not has_choice:
        raise Difference("wrong report", f"{where} was to leave something out: {sent}")
    if has_choice and is_thresholded and not sent.num_bytes < sent.dense_bytes:
        raise Difference("wrong report", f"{where} chose to send more than in DDP: {sent}")


def _check_chosen(case: Case, sent: GradientReport, num_sums: int, where: str) -> None:
    """Check how many elements a rank says that it has sent in one step."""
    sizes = [param.numel() for param in initial_dense(case).values()]
    num_sums *= sent.num_thresholded_steps
    most = num_sums * sum(_most_of(case, size) for size in sizes)
    num_elements = num_sums * sum(sizes)
    if sent.num_entries > most or sent.num_elements != num_elements:
        raise Difference(
            "more than the density",
            f"{where}: {sent.num_entries} of {sent.num_elements} elements, where {most} of "
            f"{num_elements} are allowed",
        )


def _check_sum(case: Case, applied: torch.Tensor, num_messages: int, where: str) -> None:
    """Check that no more elements have come than so many messages may hold."""
    for number, (size, values) in enumerate(_by_param(case, applied)):
        allowed = num_messages * _most_of(case, size)
        if (num_changed := int(values.count_nonzero())) > allowed:
            raise Difference(
                "more than the density",
                f"{num_changed} of {size} elements of dense parameter {number} were sent in "
                f"{where}; the density allows all ranks {allowed} together",
            )


def _most_of(case: Case, size: int) -> int:
    """How many elements of a parameter a rank may send at once."""
    share = case.dense.density * size
    return max(1, round(share)) if case.dense.kind == "local" else math.ceil(share)


def _by_param(case: Case, values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """The size and the values of each dense parameter, of which the case has all in one tensor."""
    sizes = [param.numel() for param in initial_dense(case).values()]
    yield from zip(sizes, values.split(sizes), strict=True)
