"""One run on several GPUs: its processes, and the time that a step would take on more GPUs."""
