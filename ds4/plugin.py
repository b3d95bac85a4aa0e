"""Everything a backend author imports: the contract, its records, the hooks and the errors to raise."""

from ds4.backend.contract import (
    API_VERSION,
    LAWS,
    Backend,
    Bytes,
    Capabilities,
    Float32s,
    Int32s,
    Limits,
    MemoryPlan,
    Options,
    Probe,
    Progress,
    Runner,
    StepPlan,
    cache_parts,
)
from ds4.backend.hookspecs import ENTRY_POINT_GROUP, hookimpl
from ds4.backend.layout import NONE, PAGE_TOKENS, CacheLayout, LayerLayout
from ds4.errors import (
    BackendError,
    BackendUnavailableError,
    DeviceLostError,
    LimitsError,
    MemoryPlanError,
    StateError,
    UnsupportedModelError,
)
from ds4.model.quants import FORMATS, BlockFormat, dequantize, read_ids
from ds4.model.shape import CSA, HCA, SLIDING, ModelShape
from ds4.model.weights import Model, Tensor

__all__ = [
    "API_VERSION",
    "CSA",
    "ENTRY_POINT_GROUP",
    "FORMATS",
    "HCA",
    "LAWS",
    "NONE",
    "PAGE_TOKENS",
    "SLIDING",
    "Backend",
    "BackendError",
    "BackendUnavailableError",
    "BlockFormat",
    "Bytes",
    "CacheLayout",
    "Capabilities",
    "DeviceLostError",
    "Float32s",
    "Int32s",
    "LayerLayout",
    "Limits",
    "LimitsError",
    "MemoryPlan",
    "MemoryPlanError",
    "Model",
    "ModelShape",
    "Options",
    "Probe",
    "Progress",
    "Runner",
    "StateError",
    "StepPlan",
    "Tensor",
    "UnsupportedModelError",
    "cache_parts",
    "dequantize",
    "hookimpl",
    "read_ids",
]
