"""The types of what `__init__.py` offers, which imports none of it."""

from gpuslice.api import Candidates as Candidates
from gpuslice.api import Cluster as Cluster
from gpuslice.api import ExplainedPod as ExplainedPod
from gpuslice.api import explain as explain
from gpuslice.api import place as place
from gpuslice.api import read_cluster as read_cluster
from gpuslice.api import simulate as simulate
from gpuslice.core.errors import GpusliceError as GpusliceError
from gpuslice.core.explanation import NodeClass as NodeClass
from gpuslice.core.model import Card as Card
from gpuslice.core.model import CardSlice as CardSlice
from gpuslice.core.model import Placement as Placement
from gpuslice.core.model import Pod as Pod
from gpuslice.core.model import Request as Request
from gpuslice.core.placement import NodeState as NodeState
from gpuslice.diagnosis.explain.facts import NoSuchPodError as NoSuchPodError
from gpuslice.diagnosis.simulate.rule import Simulation as Simulation
from gpuslice.diagnosis.usage import ContainerUsage as ContainerUsage

__all__: list[str]
__version__: str
