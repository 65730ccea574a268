"""What a run is, in frozen values: arms, scales, tiers, targets. Standard library only."""
