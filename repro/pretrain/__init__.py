"""Pre-training of small policies from scratch: one loop, recipes as values.

`recipes` holds what is fixed, `batches` and `human_data` what is read, `next_token` the losses,
`material` brings them together, `training` is the loop, `saved_state` where it goes on,
`policy_folders` what is written, `examination` how it is measured, `procedure` the run with its
record.
"""
