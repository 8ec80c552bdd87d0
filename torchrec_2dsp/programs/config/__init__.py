"""Config files and result files: TOML with overrides and includes, checked by shared sections.

- `section`: `Section`, the base of every part of a config; files written as a whole or not at all.
- `config_file`: read a file, apply ``--set``, resolve paths, explain what is wrong.
- `sections`: optimizers, exchange, replication, splits, balanced samples.
- `dense`: the dense part, one class for each kind.

`section` and `config_file` need neither torch nor TorchRec, so that results are read quickly. The
sections of one program lie in that program's room.
"""
