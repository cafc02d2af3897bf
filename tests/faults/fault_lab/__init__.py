"""Faults injected into real runs of the trainer; used by the scripts beside this package."""

import os

# Before NumPy or torch: their thread pools would not survive the forks of `lab`.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
