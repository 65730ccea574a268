"""One run on several GPUs: its processes, and what it takes on each number of them."""
