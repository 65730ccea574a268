"""Problems from all sources, and the prompts that are made from them."""
