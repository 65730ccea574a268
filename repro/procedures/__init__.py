"""Procedures that train, tune or ask policies; each carries out one run."""
