"""The reproducibility suite of QeRL (arXiv 2510.11696): a command and a verdict for each claim.

Importing this package is free of side effects and of torch: `python -m repro list` answers at once.
"""

__version__ = "0.1.0"
