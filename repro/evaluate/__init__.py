"""Evaluation: prompts, sampled completions, and their grades.

`questions` renders problems as prompts, `asking` samples completions, and
`grades` grades and averages them. `scale_evaluator` evaluates as the scale of a run says. All tiers
use these functions; a single run is a list of one.
"""
