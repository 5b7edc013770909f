"""Own kernels: tensors in, tensors out."""
