"""The log of a run in progress: steps, completions, warnings and trackers.

`run_logger` writes to the run's folder (`stream`, `completions`) and to `trackers`; `watch` warns
if the run does not learn. Logging does not change results.
"""
