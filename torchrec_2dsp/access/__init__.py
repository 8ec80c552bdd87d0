"""Access statistics: how often each row is looked up, and the hot rows that follow.

`RowCounter` (`counter`) counts batches and gathers over ranks; `AccessStats` (`stats`) holds a
`TableAccess` per table (`table_access`) and is stored as Parquet (`parquet`). A `HotSet` is the
rows of a table that every rank holds.
"""

from torchrec_2dsp._compat.upstream_names import require_upstream

require_upstream()
