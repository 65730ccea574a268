"""What a user keeps: a run's steps while it goes on, its completions, and checkpoints for others.

`keeper` writes a run's steps and completions into its folder and to trackers (`stream`,
`completions`, `trackers`). `quantising` and `exporting` are the commands that write checkpoint
folders; each compares logits (`comparing`) before a folder appears under its name.
"""
