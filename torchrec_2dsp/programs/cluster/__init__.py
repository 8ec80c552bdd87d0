"""The emulated cluster: hosts that are network namespaces of one machine, on links of limited rate.

    host 0: ranks 0, 1 --eth0-- rate limit --+
                                             bridge
    host 1: ranks 2, 3 --eth0-- rate limit --+

Ranks of one host share its link, as on real machines; within a host they use its loopback.
"""
