"""Four-bit formats and the operations on them: reference, kernels, dispatch.

This module imports nothing and defines no version, on purpose: `transformers` looks for a package
called `kernels` and imports it while it is itself being imported. See `kernels/README.md`.
"""
