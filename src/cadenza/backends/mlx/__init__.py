"""The MLX backend: mlx-lm's models on Apple silicon, or on Linux with MLX's CPU or CUDA builds."""
