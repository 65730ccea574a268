"""Rollouts: prompts go in, completions with the log-probabilities they were drawn with come out.

`sampler` holds the protocol and its values, `torch_sampler` the plain-torch sampler on the policy's
own tensors, `decode` its forward pass over a static cache, and `draw` the choice of a token.
"""
