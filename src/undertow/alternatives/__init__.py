"""Other ways to the same bits, for the planner to choose from. Importing this package registers them."""

from undertow.alternatives import batch_norm_again as batch_norm_again
from undertow.alternatives import convolution_parts as convolution_parts
