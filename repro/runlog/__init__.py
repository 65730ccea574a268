"""The log of a run in progress: steps, completions, warnings and trackers; it moves no number."""
