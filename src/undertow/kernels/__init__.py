"""Undertow's own kernels: tensors in, tensors out."""
