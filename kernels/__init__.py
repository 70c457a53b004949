"""One file an operation of the forward pass, its formula, shapes and fp32 reference side by side."""
