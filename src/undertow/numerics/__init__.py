"""What `numerics="fast"` changes: passes from Program to Program that may change bits, within stated bounds."""
