"""The commands `compare` and `regress`: whether new records are worse than old ones.

`sides` gathers the two sets of records, `judgement` compares them, `render` formats the result, and
`regression_commands` has the commands.
"""
