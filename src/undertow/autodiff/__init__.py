"""The backward pass, derived."""
