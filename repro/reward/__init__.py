"""Rewards: extraction of a completion's answer, grading with math-verify, and the reward.

docs/grading.md has a table of the answers that count as equal.
"""
