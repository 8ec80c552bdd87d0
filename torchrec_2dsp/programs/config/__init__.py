"""Config files and result files: TOML with overrides and includes, validated by shared sections.

- `section`: `Section`, the base for every part of a config; atomic file writes.
- `config_file`: read a file, apply ``--set``, resolve paths, explain errors.
- `sections`: optimizers, exchange, replication, splits.
- `dense`: the dense part, one class per kind.
- `machines`: machines that needn't be there.

`section` and `config_file` need neither torch nor TorchRec, so that results are read quickly.
Sections that only one program uses are in that program's package.
"""
