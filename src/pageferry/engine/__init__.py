"""The model on torch: weights, pages, batches, forward pass, sampling."""
