"""Random configurations of the plugin, trained for a few steps beside a simulation of them.

Here live the draw of a case (`draw`), the simulation that says what must come out (`oracle`), the
run of a case on real ranks (`run`), the comparison (`judge`), and what finds the smallest case that
still fails (`shrink`). No test of one named feature lives here; those are in ``tests/dist``.

    a seed -> a case -> its actions -> ranks: what they saw ---+
                                    -> oracle: what they must  +-> verdict -> smallest case
"""
