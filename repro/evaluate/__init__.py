"""Evaluation: questions to policies, their sampled completions, and the grades of these.

`questions` renders problems as prompts, `asking` has one or many policies complete them, `grades`
reads and averages the completions. `scale_evaluator` asks what a run's scale says. Every
tier is evaluated by these functions: a single run is a list of one.
"""
