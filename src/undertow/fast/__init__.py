"""Kernels of our own as operations, and for which nodes they may stand: one file per family."""
