"""One record per operation. Importing this package registers every family."""

from undertow.ops import activations as activations
from undertow.ops import arithmetic as arithmetic
from undertow.ops import elementwise as elementwise
from undertow.ops import selection as selection
