"""Program to Program: cleaning, layout, folding, fusion, the choice of kernels, updates."""
