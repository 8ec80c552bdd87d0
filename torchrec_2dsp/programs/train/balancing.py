"""A run's batches, dealt to the ranks if it says so, and what became of them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchrec.datasets.utils import Batch

from torchrec_2dsp.programs.config.balance import MEASURED, BalanceConfig
from torchrec_2dsp.programs.models.balance import deal_batches
from torchrec_2dsp.programs.models.kinds import ModelSection
from torchrec_2dsp.programs.train.stepping import Output, Stepper, closing_batches
from torchrec_2dsp.samples.balanced_batches import BalancedBatches
from torchrec_2dsp.samples.report import BalanceReport


@contextmanager
def training_batches(
    batches: Iterator[Batch], balance: BalanceConfig | None, model: ModelSection
) -> Iterator[Iterator[Batch]]:
    """A context for the batches that a run trains, which are closed at its end.

    Args:
        batches: those that this rank reads.
        balance: how samples are dealt; without it each rank trains what it reads.
        model: what is trained.

    Collectives:
        Those of `deal_batches`.
    """
    with closing_batches(batches) as own:
        if balance is None:
            yield own
            return
        with deal_batches(own, balance, model) as dealt:
            yield dealt


def balance_report(batches: Iterator[Batch]) -> BalanceReport | None:
    """What became of batches so far; `None` if they aren't dealt."""
    return batches.report if isinstance(batches, BalancedBatches) else None


class TimedSteps:
    """Steps whose processor time each rank tells, so that slower ranks get less to do.

    While a rank waits for others it uses no processor.
    """

    def __init__(self, steps: Stepper, note_seconds: Callable[[float], None]) -> None:
        """
        Args:
            steps: the way to train a step.
            note_seconds: told the seconds of each.
        """
        self._steps, self._note_seconds = steps, note_seconds

    def step(self, batches: Iterator[Batch]) -> Output:
        """Train a step."""
        start = time.thread_time()
        output = self._steps.step(batches)
        self._note_seconds(time.thread_time() - start)
        return output

    def pause(self) -> None:
        """Give the model back."""
        self._steps.pause()


def timed_steps(steps: Stepper, batches: Iterator[Batch], balance: BalanceConfig | None) -> Stepper:
    """A way to train steps that tells their times, if ranks' speeds are measured."""
    is_measured = balance is not None and balance.rank_speeds == MEASURED
    if is_measured and isinstance(batches, BalancedBatches):
        return TimedSteps(steps, batches.note_seconds)
    return steps
