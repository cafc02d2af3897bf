"""One file a backend with its row; `BACKENDS` is the table of them."""

from megatron_patch.attention.backends import fa4, mcore_local, reference, sage, sdpa, stable, te
from megatron_patch.attention.backends.row import Backend

BACKENDS: dict[str, Backend] = {
    row.name: row
    for row in (
        stable.BACKEND,
        sdpa.CUDNN,
        sdpa.FLASH,
        fa4.BACKEND,
        sage.BACKEND,
        te.BACKEND,
        mcore_local.BACKEND,
        reference.BACKEND,
    )
}
