"""Turns off garbage collection before large imports, which leave many objects, little garbage.

Ranks turn it on again, see `tests.support.rank_worker`.
"""

import gc

gc.disable()
