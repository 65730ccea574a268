"""Whether new records are worse than old ones: `compare` and `regress`.

`sides` gathers the two sets of records, `repro.evidence.verdicts.compare` judges them, `render`
writes the judgement down, and `command` is what the command line calls.
"""
