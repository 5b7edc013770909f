"""Small networks at work: layers of single bits, and layers that evaluate from coded weights as they are."""
