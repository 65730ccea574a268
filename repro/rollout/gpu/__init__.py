"""The engine on a GPU: its backend, captured graphs, fused projections and kernels."""
