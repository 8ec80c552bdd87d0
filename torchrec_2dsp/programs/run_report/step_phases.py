"""`StepPhase`: the parts of a step, and by which names of a trace they are known."""

import re
from dataclasses import dataclass, replace
from enum import StrEnum

from torchrec_2dsp.programs.run_report.rank_trace import HostSpan


class StepPhase(StrEnum):
    """What a rank is doing at a moment of a step, in the order of a step."""

    NEXT_BATCH = "next batch"
    """Takes a batch from the data, or waits for a dealt one, and brings it to the device."""
    IDS = "ids"
    """Sends the ids of a batch to the ranks that own their rows."""
    LOOKUP = "lookup"
    """Looks up rows."""
    ROWS = "rows"
    """Sends rows or pooled rows to the ranks that have the samples."""
    DENSE_FORWARD = "dense forward"
    """Runs what isn't a table."""
    DENSE_BACKWARD = "dense backward"
    """Runs the backward of what isn't a table."""
    ROW_GRADIENTS = "row gradients"
    """Sends gradients of rows, or of pooled rows, back to the rows' owners."""
    TABLE_UPDATE = "table update"
    """Adds up the gradients of each row, and updates the tables."""
    REPLICA_SYNC = "replica sync"
    """Tells the other copies of a row what has become of it."""
    DENSE_GRADIENTS = "dense gradients"
    """Adds up dense gradients over all ranks."""
    OPTIMIZER = "optimizer"
    """Updates what isn't a table, and clears gradients."""
    OTHER = "other"
    """Does what no range of the trace names."""


@dataclass(frozen=True)
class PhaseAtMoment:
    """What the innermost span of a thread says of a moment."""

    phase: StepPhase
    """The part of the step."""

    may_wait: bool = False
    """Whether the thread waits if a collective is under way: it runs no operator, and is where
    TorchRec or this package waits."""

    def inside(self, span: HostSpan) -> "PhaseAtMoment":
        """What ``span`` says of its moments, if it lies in a span that says this."""
        if span.name.startswith("c10d::"):
            sends_dense = self.phase is StepPhase.DENSE_BACKWARD
            phase = StepPhase.DENSE_GRADIENTS if sends_dense else self.phase
            return PhaseAtMoment(phase, may_wait=True)
        if span.name.startswith(_SAMPLES):
            return PhaseAtMoment(StepPhase.NEXT_BATCH, may_wait=True)
        for phase, names in _NAMES.items():
            if names.search(span.name):
                # Row gradients are applied by a lookup of their rows and its backward.
                if (self.phase, phase) == (StepPhase.TABLE_UPDATE, StepPhase.LOOKUP):
                    phase = self.phase
                computes = span.is_operator and not _EXCHANGES.search(span.name)
                return PhaseAtMoment(phase, may_wait=phase in _WAITING and not computes)
        return replace(self, may_wait=False) if span.is_operator else self


_WAITING = (
    StepPhase.IDS,
    StepPhase.ROWS,
    StepPhase.DENSE_BACKWARD,
    StepPhase.ROW_GRADIENTS,
    StepPhase.REPLICA_SYNC,
    StepPhase.DENSE_GRADIENTS,
)
"""The phases in which ranks wait for collectives."""

_EXCHANGES = re.compile(
    r"_(Req|Wait)(Backward)?$|AllToAllSingle"
    r"|_(Arriving|Leaving|Put|Taken|ReduceScatterRagged)(Backward)?$"
)
"""Autograd functions that send and wait."""

_SAMPLES = "## wait for samples"
"""The range in which a rank waits for the samples that it is dealt."""

# The first that fits counts: names of a backward before those of its forward.
_NAMES: dict[StepPhase, re.Pattern[str]] = {
    phase: re.compile(names)
    for phase, names in (
        (StepPhase.OPTIMIZER, r"^## (optimizer|zero_grad)|^Optimizer\."),
        (
            StepPhase.NEXT_BATCH,
            r"^## (next_batch|load_batch|wait_for_batch|(inplace_)?copy_(batch_)?to_gpu)",
        ),
        (
            StepPhase.IDS,
            r"^## (start|wait)_sparse_data_dist|^\[(splits|input)_dist|^## all2all_data"
            r"|^## \w*(KJT|Splits)\w* wait|^## (runtime_forward_assemble_KJT|dist_init)"
            r"|^## ((request|announce) rows|check ids)",
        ),
        (
            StepPhase.TABLE_UPDATE,
            r"^## (capture|apply) rows|(Captured|Direct)LookupBackward|SplitLookupFunc"
            r"|^fbgemm::\w*embedding\w*backward",
        ),
        (
            StepPhase.ROW_GRADIENTS,
            r"^## finish row gradients|_bwd?\b|_bwd_|_(Req|Wait)Backward$|AllToAllSingleBackward"
            r"|_(Arriving|Leaving|Pooled|Put|Taken|ReduceScatterRagged)Backward$",
        ),
        (
            StepPhase.LOOKUP,
            r"^\[lookup|^## (start_embedding_lookup|arrange rows)|_(Captured|Direct)Lookup$"
            r"|^fbgemm::\w*embedding\w*(lookup|forward)",
        ),
        (
            StepPhase.ROWS,
            r"^\[output_dist|^## \w*Embedding\w*Awaitable wait|_fwd\b|_fwd_|_(Req|Wait)$"
            r"|AllToAllSingle$|^## (all2all_(pooled|sequence)|reduce_scatter|ebc )"
            r"|^## (send late rows|rows beside computing)"
            r"|^_(Arriving|Leaving|Pooled|Put|Taken|ReduceScatterRagged)$",
        ),
        (
            StepPhase.REPLICA_SYNC,
            r"^## (replica sync|dmp_collection_sync|note rows|2d_reduce_scatter|2d_allgather)",
        ),
        (StepPhase.DENSE_GRADIENTS, r"^## dense gradients"),
        (StepPhase.DENSE_BACKWARD, r"^## backward \d* ?##"),
        (StepPhase.DENSE_FORWARD, r"^## (dense_)?forward|^DistributedDataParallel\.forward"),
    )
}
"""The names of ranges and operators by which a phase is known: TorchRec's, torch's and ours."""
