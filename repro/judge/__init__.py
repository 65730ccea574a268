"""From records to verdicts: check, blessed records, blessing, the choice of learning rates."""
