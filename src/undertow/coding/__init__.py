"""Small files of compressed networks: coded tensors, entropy coders, the `.utz` format."""
