"""From records to verdicts: check, blessed records, blessing, bundles of others' records."""
