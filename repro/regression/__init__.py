"""The commands `compare` and `regress`: whether new records are worse than old ones.

`repro.judge.as_before` has the rule; `judgement` gathers, compares and describes two sets of
records, and `regression_commands` has the commands.
"""
