"""Reinforcement learning: advantages, losses, added noise, the training loop, checkpoints."""
