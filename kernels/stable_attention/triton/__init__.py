"""Portable Triton kernels: sm_80, sm_90, sm_100 and the CPU interpreter."""
