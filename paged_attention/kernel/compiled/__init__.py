"""Kernels that a compiler makes."""
