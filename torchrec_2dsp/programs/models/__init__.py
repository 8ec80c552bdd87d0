"""The models that programs train, from a config section to a sharded model's parts.

`kinds` maps a ``[model]`` section to its model: DLRM and DCN (`model`), a next-item transformer
(`sequence`, `sequence_layers`), two towers (`two_tower`) or a user's factory (`own_model`), with
`ranking` for their evaluation. `planned` plans tables, `dense` runs the dense part, `optimizer`
updates both. Data comes from `programs.data`; loops live in their
programs.
"""
