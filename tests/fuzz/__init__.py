"""Random plugin configurations, trained for a few steps beside a simulation.

A case is drawn (`draw`), simulated to get the expected results (`oracle`), run on real ranks
(`run`), compared (`judge`), and, if it fails, reduced to the smallest case that still does
(`shrink`). Tests for one named feature belong in ``tests/dist``.

    a seed -> a case -> its actions -> ranks: what they saw ---+
                                    -> oracle: what they must  +-> verdict -> smallest case
"""
