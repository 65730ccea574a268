"""Rollouts: prompts go in, completions with the log-probabilities they were drawn with come out.

`sampler` holds the protocol and its values, `engine` the sampler of large policies, `draw` the
choice of a token. The sampler of CPUs is `repro.rl.single_run.torch_sampler`, on the pass of many
small runs.
"""
