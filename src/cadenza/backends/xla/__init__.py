"""The OpenXLA backend, through JAX: CPU, NVIDIA and TPU. The only package that imports jax."""
