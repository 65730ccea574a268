"""Rewards: extraction of a completion's answer, grading with math-verify, and the reward.

docs/grading.md has a table of the answers that count as equal. `answers` extracts the answer from a
text; `quantities`, `units` and `expression` decide which answers may be compared, and `finished`
which equal answers are rewarded; `verifier` is the worker process and the only module that imports
`math_verify`, `grader` the pool of these workers, and `score` turns grades into rewards.
"""
