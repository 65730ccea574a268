"""What a completion earns: extraction of its answer, grading by math-verify, and the reward.

What counts as equal is a table (docs/grading.md). `answers` reads a completion's text;
`quantities`, `units` and `expression` say which answers may be compared at all, `finished` which
equal answers are paid; `verifier` is the worker process and the only module that imports
`math_verify`, `grader` the pool of such workers, and `score` turns grades into rewards.
"""
