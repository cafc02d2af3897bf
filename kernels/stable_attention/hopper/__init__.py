"""Kernels for sm_90 in Gluon: the backward pass. `dispatch` says which calls they serve."""
