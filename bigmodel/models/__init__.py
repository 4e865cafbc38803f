"""Models as data: parameters, units, tapes, and the memory of optimizers."""

from bigmodel.models.optimizers import OPTIMIZERS as OPTIMIZERS
from bigmodel.models.optimizers import OptimizerRow as OptimizerRow
from bigmodel.models.optimizers import Shape as Shape
from bigmodel.models.size import Size as Size
from bigmodel.models.spec import DTYPE_BYTES as DTYPE_BYTES
from bigmodel.models.spec import INPUTS_KEPT as INPUTS_KEPT
from bigmodel.models.spec import ModelSpec as ModelSpec
from bigmodel.models.spec import Param as Param
from bigmodel.models.spec import Phases as Phases
from bigmodel.models.spec import Placed as Placed
from bigmodel.models.spec import Unit as Unit
from bigmodel.models.tape import Event as Event
from bigmodel.models.tape import Gradient as Gradient
from bigmodel.models.tape import Kind as Kind
from bigmodel.models.tape import Op as Op
from bigmodel.models.tape import Storage as Storage
from bigmodel.models.tape import Tape as Tape
