"""What a Program costs, as data, text and pictures."""
