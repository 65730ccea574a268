"""Measurements of time and memory: rollouts, steps, kernels, and the state of the device."""
