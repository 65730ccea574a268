"""Kernels in Triton, for every GPU from compute capability 8.0 on."""
