"""One run on several GPUs: its processes, and what a step would take on more of them."""
