"""Device kernels, and beside each the plain torch that specifies it and runs on the CPU."""
