"""CUDA C++ kernels for Hopper: sources, their compiler, and how they are launched and chosen."""
