"""The front door: a model, data and a reward of a user's own, trained as targets are."""
