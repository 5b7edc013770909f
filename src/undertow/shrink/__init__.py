"""Shrinks a trained network: prunes and retrains, shares weights, and keeps the smallest file that is good enough."""
