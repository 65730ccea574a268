"""Pre-training of the tiny policy from scratch, in minutes on two cores.

`recipes` holds what is fixed, `batches` what is read, `training` is the loop, `saved_state` where
it goes on, `recorded_run` the run with its checkpoints, their quality and its record.
"""
