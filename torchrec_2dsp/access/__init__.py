"""Access statistics: each row's lookup count, and hot rows chosen from the counts.

    batches --RowCounter--> a rank's counts --gather--> AccessStats --from_stats--> HotSet

`RowCounter` (`counter`) counts batches and gathers over ranks. `AccessStats` (`stats`) holds a
`TableAccess` per table (`table_access`) and is stored as Parquet. A `HotSet` lists a table's rows
that every rank holds.
"""

from torchrec_2dsp._compat.versions import require_upstream

require_upstream()
