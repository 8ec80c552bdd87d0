"""Everything that a plan is checked for, in the order in which it can be known.

`table_configs`: tables that can be planned at all, before a search. `shards` and `fits_mesh`: a
plan by itself, whenever one is made. `fits_module`: a plan beside the module that it shards.
"""
