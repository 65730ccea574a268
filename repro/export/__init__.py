"""Checkpoint folders for other programs: `quantize` and `export`.

Both compare logits (`comparing`) before the folder gets its final name.
"""
