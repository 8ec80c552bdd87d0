"""One rank's row gradients as tensors: summed by row (`gradients`), applied to a TBE (`update`).

    a lookup's output gradient   [bags, dim]   -> one gradient per distinct row   [rows, dim]
                                               -> one fused update, as the kernel's own backward

No process groups: `replicas` merges these gradients over ranks.
"""

from torchrec_2dsp._compat.versions import require_upstream

require_upstream()
