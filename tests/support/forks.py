"""Ranks that are forks of a process that has imported everything."""

import os
import sys


def fork_ranks(num_ranks: int) -> int | list[int]:
    """In each fork its rank; here, when all have ended, their exit codes.

    A fork that returns from its program ends as a whole interpreter does.
    """
    sys.stdout.flush()
    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            return rank
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
