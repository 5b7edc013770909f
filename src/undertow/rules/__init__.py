"""One record per operation. Importing this package registers every family."""

from undertow.rules import activations as activations
from undertow.rules import arithmetic as arithmetic
from undertow.rules import attention as attention
from undertow.rules import convolution as convolution
from undertow.rules import distance as distance
from undertow.rules import elementwise as elementwise
from undertow.rules import extrema as extrema
from undertow.rules import grid_sampling as grid_sampling
from undertow.rules import indexing as indexing
from undertow.rules import linear_algebra as linear_algebra
from undertow.rules import loss as loss
from undertow.rules import movement as movement
from undertow.rules import nondifferentiable as nondifferentiable
from undertow.rules import normalization as normalization
from undertow.rules import pooling as pooling
from undertow.rules import random as random
from undertow.rules import recurrent as recurrent
from undertow.rules import reductions as reductions
from undertow.rules import resampling as resampling
from undertow.rules import running as running
from undertow.rules import scatter_reduce as scatter_reduce
from undertow.rules import selection as selection
from undertow.rules import shape as shape
