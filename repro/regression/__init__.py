"""The commands `compare` and `regress`: whether new records are worse than old ones.

`repro.judge.as_before` has the rule; `judgement` gathers and compares two sets of records, `render`
formats the result, and `regression_commands` has the commands.
"""
