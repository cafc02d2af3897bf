"""Helpers of the fuzzers are plain modules in this folder.

A fuzzer has a count of examples, short by default and long under the marker slow. Its examples are
the same on every run; hypothesis prints the smallest that fails.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))
