"""Kernels in Triton, for every GPU from compute capability 8.0 on."""

# Of every launch: a product and a sum are rounded once, as in all stored records. From Triton 3.10
# on that is no longer the default.
FUSED = {"enable_fp_fusion": True}
