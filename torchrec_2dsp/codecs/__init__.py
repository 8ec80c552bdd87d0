"""How numbers look on the wire: pure functions of tensors, each with a stated error.

`rows` encodes every row of a matrix by itself, in as many bytes as both ends can tell from its
width; `transport` names what a user may ask for.
"""
