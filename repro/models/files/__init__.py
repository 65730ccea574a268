"""Files of weights, read to tensors or refused by field; those written here, too."""
