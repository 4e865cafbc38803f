"""Programs of tasks on streams, and the timeline that comes of running them."""

from bigmodel.simulator.caching_allocator import AllocatorSettings as AllocatorSettings
from bigmodel.simulator.costs import Costs as Costs
from bigmodel.simulator.program import Holdings as Holdings
from bigmodel.simulator.program import Program as Program
from bigmodel.simulator.program import ProgramBuilder as ProgramBuilder
from bigmodel.simulator.program import Task as Task
from bigmodel.simulator.replay import Replayed as Replayed
from bigmodel.simulator.replay import replay as replay
from bigmodel.simulator.segments import Segment as Segment
from bigmodel.simulator.simulation import simulate as simulate
from bigmodel.simulator.timeline import Peak as Peak
from bigmodel.simulator.timeline import Timeline as Timeline
