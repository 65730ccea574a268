"""One run on several GPUs: its processes, and the room that they have."""
