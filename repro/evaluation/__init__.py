"""Evaluation: prompts, sampled completions, and their grades."""
