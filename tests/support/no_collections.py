"""Imported before large modules, whose imports leave little to collect and much to look at.

A rank collects again, see `tests.support.rank_worker`.
"""

import gc

gc.disable()
