"""Policies: a transformers decoder with a quantised base, an adapter, and norms that take noise."""
