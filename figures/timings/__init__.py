"""Pictures of what was timed: rollouts, steps, kernels, memory."""
