"""Imported before large modules: imports make little garbage, and collections look at all they made.

A rank collects again, see `tests.support.rank_worker`.
"""

import gc

gc.disable()
