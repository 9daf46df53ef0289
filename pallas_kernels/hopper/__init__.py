"""The attention kernels for Hopper GPUs, by Pallas' Mosaic GPU backend: groups of warps compute, one copies."""
