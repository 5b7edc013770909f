"""One record per operation. Importing this package registers every family."""

from undertow.ops import activations as activations
from undertow.ops import arithmetic as arithmetic
from undertow.ops import attention as attention
from undertow.ops import casting as casting
from undertow.ops import convolution as convolution
from undertow.ops import distance as distance
from undertow.ops import elementwise as elementwise
from undertow.ops import extrema as extrema
from undertow.ops import grid_sampling as grid_sampling
from undertow.ops import indexing as indexing
from undertow.ops import linear_algebra as linear_algebra
from undertow.ops import loss as loss
from undertow.ops import movement as movement
from undertow.ops import nondifferentiable as nondifferentiable
from undertow.ops import normalization as normalization
from undertow.ops import pooling as pooling
from undertow.ops import random as random
from undertow.ops import recurrent as recurrent
from undertow.ops import reductions as reductions
from undertow.ops import resampling as resampling
from undertow.ops import running as running
from undertow.ops import sampling as sampling
from undertow.ops import scatter_reduce as scatter_reduce
from undertow.ops import selection as selection
from undertow.ops import shape as shape
