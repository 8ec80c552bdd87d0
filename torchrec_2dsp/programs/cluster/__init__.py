"""The emulated cluster: network namespaces on one machine act as hosts, on rate-limited links.

    host 0: ranks 0, 1 --eth0-- rate limit --+
                                             bridge
    host 1: ranks 2, 3 --eth0-- rate limit --+

A host's ranks share its link, as on real machines; within a host they use its loopback.
"""
