"""What a run writes down while it goes on: its steps, its completions, warnings, trackers.

`run_logger` writes them into the run's folder (`stream`, `completions`) and to `trackers`; `watch`
says when training teaches nothing. None of it moves a number.
"""
