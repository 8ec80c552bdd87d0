"""Encodes numbers for the wire: pure functions on tensors, each with a stated error.

    rows   [n, dim] fp32  --encode-->  [n, columns]  --decode-->  [n, dim]      row by row
    flat   [size]   fp32  --encode-->  bytes         --decode-->  [size]        in blocks
    sparse the largest elements        bytes                      (positions, values)

`rows` has the codecs for rows and for flat numbers, and `Transport`, whose members users choose
from. `sparse` has the codec for a few elements in a large tensor, the threshold that chooses
them, and the error feedback that keeps the others for later. Both ends know every message's size.
Nothing here communicates: `torchrec_2dsp.comms` does.
"""
