"""Everything a backend author imports: the contract, its records, the hooks and the errors to raise."""

from ds4.backend.contract import (
    API_VERSION,
    DUTIES,
    LAWS,
    NUMERICS,
    Backend,
    Capabilities,
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
from ds4.errors import BackendError, BackendUnavailableError, DeviceLostError, MemoryPlanError, UnsupportedModelError
from ds4.model.shape import CSA, HCA, SLIDING, ModelShape

__all__ = [
    "API_VERSION",
    "CSA",
    "DUTIES",
    "ENTRY_POINT_GROUP",
    "HCA",
    "LAWS",
    "NONE",
    "NUMERICS",
    "PAGE_TOKENS",
    "SLIDING",
    "Backend",
    "BackendError",
    "BackendUnavailableError",
    "CacheLayout",
    "Capabilities",
    "DeviceLostError",
    "LayerLayout",
    "Limits",
    "MemoryPlan",
    "MemoryPlanError",
    "ModelShape",
    "Options",
    "Probe",
    "Progress",
    "Runner",
    "StepPlan",
    "UnsupportedModelError",
    "cache_parts",
    "hookimpl",
]
