"""GPU tests use the helpers of the folder above."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
