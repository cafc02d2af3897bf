"""Makes the helper modules of this folder importable, here and in the processes tests start."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))


@pytest.fixture(scope="session")
def ranks():
    """Two processes with torch and Megatron imported once; see rank_pool.py."""
    from rank_pool import RankPool

    with RankPool(2) as pool:
        yield pool
