"""From the values of records to verdicts: tests, sizes, intervals, comparisons and their words."""
