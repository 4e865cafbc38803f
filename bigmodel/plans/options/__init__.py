"""What a plan says to one library alone: a block of fields for each."""

from bigmodel.plans.options.ddp import DdpOptions as DdpOptions
from bigmodel.plans.options.deepspeed import DeepSpeedOptions as DeepSpeedOptions
from bigmodel.plans.options.fairscale import FairscaleOptions as FairscaleOptions
from bigmodel.plans.options.fsdp2 import Fsdp2Options as Fsdp2Options
from bigmodel.plans.options.horovod import HorovodOptions as HorovodOptions
from bigmodel.plans.options.offload import Offload as Offload
