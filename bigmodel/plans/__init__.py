"""The waist of the library: what was decided, on plain frozen data."""

from bigmodel.plans import document as document
from bigmodel.plans.batching import accumulation_for as accumulation_for
from bigmodel.plans.batching import micro_batches as micro_batches
from bigmodel.plans.mesh import Mesh as Mesh
from bigmodel.plans.number_formats import NUMBER_FORMATS as NUMBER_FORMATS
from bigmodel.plans.options import DdpOptions as DdpOptions
from bigmodel.plans.options import DeepSpeedOptions as DeepSpeedOptions
from bigmodel.plans.options import FairscaleOptions as FairscaleOptions
from bigmodel.plans.options import Fsdp2Options as Fsdp2Options
from bigmodel.plans.options import HorovodOptions as HorovodOptions
from bigmodel.plans.options import Offload as Offload
from bigmodel.plans.training_plan import Plan as Plan
from bigmodel.plans.training_plan import Precision as Precision
from bigmodel.plans.training_plan import RecomputePolicy as RecomputePolicy
from bigmodel.plans.training_plan import Stages as Stages
