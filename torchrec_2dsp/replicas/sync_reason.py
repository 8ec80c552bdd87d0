"""`SyncReason`: why a program stands at a sync point."""

import enum


class SyncReason(enum.Enum):
    """Why a program reaches a sync point."""

    BACKWARD_OVER = "a backward is over"
    """What is captured is sent, and an average that is due is taken. Nobody needs the rows yet."""

    LOOKUP = "rows are about to be looked up in training"
    """What was sent is applied, but for the steps that may be late."""

    READ = "someone looks at the replicas: a checkpoint, an evaluation, a user"
    """Everything is applied, and all copies are equal."""
