"""Kernels for sm_90 in Gluon. `dispatch` says which calls they serve."""
