"""Which errors of a file system may pass, and which come back however often one tries."""

from __future__ import annotations

import errno

MAY_PASS = frozenset(
    getattr(errno, name)
    for name in (
        # a server or the way to it: a soft mount, an evicted client, a failing disk of one node
        "EIO", "ESTALE", "ETIMEDOUT", "EREMOTEIO", "ENOTCONN", "ESHUTDOWN", "ECONNRESET",
        "ECONNABORTED", "ECONNREFUSED", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH",
        # something that others use up, and give back
        "ENOSPC", "EDQUOT", "ENOLCK", "EMFILE", "ENFILE", "ENOMEM", "EAGAIN", "EBUSY", "EINTR",
    )
)  # fmt: skip
"""A file that is missing, forbidden or not a file is not among them: a person has to act."""


def may_pass(error: OSError) -> bool:
    """Whether the same call may succeed later, or on another node."""
    return error.errno in MAY_PASS
