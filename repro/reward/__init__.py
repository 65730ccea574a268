"""What a completion earns: extraction of its answer, grading by math-verify, and the reward.

`answers` reads a completion's text, `expression` says which answers may be compared at all,
`verifier` is the worker process and the only module that imports `math_verify`, `grader` is the
pool of such workers, `score` turns grades into rewards, and `metrics` holds pass@k and maj@k.
"""
