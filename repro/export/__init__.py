"""Checkpoint folders for other programs: `quantize` and `export`.

Each compares logits (`comparing`) before a folder appears under its name.
"""
