"""The commands `compare` and `regress`: whether new records are worse than old ones.

`repro.judge.as_before` has the rule; `judgement` gathers and compares two sets of records and
writes the result, and `regression_commands` has the commands.
"""
