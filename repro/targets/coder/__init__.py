"""Targets on real checkpoints of the paper's family, Qwen2.5-Coder, in two rounds."""
