"""Many small runs at once: S runs of one model shape trained as one batched model.

A policy of 30 M parameters leaves a large GPU idle; fifty of them together do not. Every tensor
here carries a leading run dimension S. What a run *is* (its problems, seeds, noise, loss, rewards,
metrics) comes from `repro.rl`, run by run; only what is computed on the device is batched.
"""
