"""The operations as Triton kernels, one file each, named like the torch file that holds the reference."""
