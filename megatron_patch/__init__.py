"""Stable BF16 GPT pretraining on Megatron-Core: attention backend, trainer, command line."""

import sys

__version__ = "0.1.0"
__distribution__ = "megatron-patch-stable"

PYTHON_NEEDED = (3, 12)


def python_complaint(version=sys.version_info):
    """One sentence when this Python is too old, else None. Parsed by every Python 3."""
    if tuple(version[:2]) >= PYTHON_NEEDED:
        return None
    return (
        "megatron_patch needs Python {}.{} or newer (megatron-core without its checkpoint-loading "
        "CVEs does); this is Python {}.{} at {}.".format(
            *PYTHON_NEEDED, version[0], version[1], sys.executable
        )
    )


_complaint = python_complaint()
if _complaint is not None:
    # `python -m megatron_patch` imports this file first; argv[0] is "-m" while it does.
    if getattr(sys, "argv", [""])[:1] == ["-m"]:
        sys.stderr.write(_complaint + "\n")
        raise SystemExit(2)
    raise ImportError(_complaint)
