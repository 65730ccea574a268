"""One run by its own policy: passes over padded and packed rows, its sampler, its optimiser."""
