"""Helpers of these tests are plain modules in this folder."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))
