"""Rollouts: prompts go in, completions with the log-probabilities they were drawn with come out.

`sampler` holds the protocol and its values, `engine` the sampler of large policies, `draw` the
choice of a token, and `torch_sampler` the sampler of CPUs and small policies.
"""
