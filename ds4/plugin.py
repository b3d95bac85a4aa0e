"""Everything a plugin imports: the contract, its records, the hooks and the errors to raise."""

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
from ds4.backend.hookspecs import ENTRY_POINT_GROUP, PLUGIN_GROUP, RegisterCommand, hookimpl
from ds4.backend.layout import NONE, PAGE_TOKENS, CacheLayout, LayerLayout
from ds4.backend.observe import StepRecord
from ds4.backend.versions import MIN_API_VERSION
from ds4.errors import (
    BackendError,
    BackendUnavailableError,
    DeviceLostError,
    Ds4Error,
    MemoryPlanError,
    UnsupportedModelError,
)
from ds4.model.shape import CSA, HCA, SLIDING, ModelShape

__all__ = [
    "API_VERSION",
    "CSA",
    "DUTIES",
    "ENTRY_POINT_GROUP",
    "HCA",
    "LAWS",
    "MIN_API_VERSION",
    "NONE",
    "NUMERICS",
    "PAGE_TOKENS",
    "PLUGIN_GROUP",
    "SLIDING",
    "Backend",
    "BackendError",
    "BackendUnavailableError",
    "CacheLayout",
    "Capabilities",
    "DeviceLostError",
    "Ds4Error",
    "LayerLayout",
    "Limits",
    "MemoryPlan",
    "MemoryPlanError",
    "ModelShape",
    "Options",
    "Probe",
    "Progress",
    "RegisterCommand",
    "Runner",
    "StepPlan",
    "StepRecord",
    "UnsupportedModelError",
    "cache_parts",
    "hookimpl",
]
