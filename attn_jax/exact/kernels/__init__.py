"""Kernels written for accelerators."""
