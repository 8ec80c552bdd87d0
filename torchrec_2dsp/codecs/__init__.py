"""How numbers look on the wire: pure functions of tensors, each with a stated error.

`rows` encodes every row of a matrix by itself, in as many bytes as both ends can tell from its
width; `flat` does the same for numbers without rows, in blocks. `sparse` encodes a few entries of
a large tensor, which `threshold` has chosen, and `error_feedback` keeps what was left out.
`transport` names what a user may ask for.
"""
