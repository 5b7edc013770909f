"""Operations that PyTorch does not have, and records made from others."""
