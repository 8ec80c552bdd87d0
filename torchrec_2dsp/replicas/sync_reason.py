"""`SyncReason`: why a program stands at a sync point."""

import enum


class SyncReason(enum.Enum):
    """Why a program reaches a sync point."""

    STEP = "a backward is over"
    """The rows aren't needed yet."""

    LOOKUP = "rows are about to be looked up in training"

    READ = "someone looks at the replicas: a checkpoint, an evaluation, a user"
