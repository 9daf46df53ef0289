"""The GPU kernels of sagebwd_jax. Users import sagebwd_jax; nothing here is a public interface."""
