"""The commands `compare` and `regress`: whether records are worse, by `repro.judge.as_before`."""
