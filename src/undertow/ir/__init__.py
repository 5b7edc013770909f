"""The data that stages exchange: types, values, Programs, their checker and printer."""

from undertow.ir.check import check_program as check_program
from undertow.ir.live import Live as Live
from undertow.ir.operation import Operation as Operation
from undertow.ir.plan import KeptValue as KeptValue
from undertow.ir.plan import Outcome as Outcome
from undertow.ir.plan import Plan as Plan
from undertow.ir.plan import Tables as Tables
from undertow.ir.printer import format_bytes as format_bytes
from undertow.ir.printer import print_program as print_program
from undertow.ir.program import Gradient as Gradient
from undertow.ir.program import Input as Input
from undertow.ir.program import InputKind as InputKind
from undertow.ir.program import Node as Node
from undertow.ir.program import Origin as Origin
from undertow.ir.program import Phase as Phase
from undertow.ir.program import Program as Program
from undertow.ir.program import Task as Task
from undertow.ir.program import Update as Update
from undertow.ir.types import OpaqueType as OpaqueType
from undertow.ir.types import TensorType as TensorType
from undertow.ir.values import Value as Value
from undertow.ir.values import map_values as map_values
from undertow.ir.values import values_in as values_in
