"""`SyncReason`: why a program stands at a sync point."""

import enum


class SyncReason(enum.Enum):
    """Where a program reaches a sync point."""

    STEP = "a backward is over"
    """Nobody needs the rows yet."""

    LOOKUP = "rows are about to be looked up in training"

    READ = "someone looks at the replicas: a checkpoint, an evaluation, a user"
