"""ds4 runs many DeepSeek-V4 conversations at once: one step of the model advances all sessions together."""

try:
    from ds4._core import DecodeItem, KVCache, Session, SyncResult
except ModuleNotFoundError as exc:
    if exc.name != "ds4._core":
        raise
    raise ImportError(
        "ds4 is being imported from its source folder, where its compiled part is not built: run `pip install -e .` "
        "there, or leave the folder and import the installed package"
    ) from None

from ds4.backend.contract import Capabilities, Limits, MemoryPlan
from ds4.engine import Engine, eval_batch
from ds4.errors import (
    BackendError,
    BackendUnavailableError,
    BatchError,
    ContextLimitError,
    DeviceLostError,
    Ds4Error,
    ForkedProcessError,
    LimitsError,
    MemoryPlanError,
    ModelFormatError,
    NoLogitsError,
    NumericError,
    PagesExhaustedError,
    PluginError,
    RewindError,
    SamplingError,
    SessionBusyError,
    SessionClosedError,
    SessionsExhaustedError,
    SettingError,
    StateError,
    StepCancelledError,
    StepError,
    TensorError,
    TextError,
    UnsupportedModelError,
)
from ds4.model.shape import ModelShape
from ds4.model.weights import Model
from ds4.sampling import SamplingParams
from ds4.snapshot import SessionState
from ds4.text.tokenizer import Tokenizer

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "BackendUnavailableError",
    "BatchError",
    "Capabilities",
    "ContextLimitError",
    "DecodeItem",
    "DeviceLostError",
    "Ds4Error",
    "Engine",
    "ForkedProcessError",
    "KVCache",
    "Limits",
    "LimitsError",
    "MemoryPlan",
    "MemoryPlanError",
    "Model",
    "ModelFormatError",
    "ModelShape",
    "NoLogitsError",
    "NumericError",
    "PagesExhaustedError",
    "PluginError",
    "RewindError",
    "SamplingError",
    "SamplingParams",
    "Session",
    "SessionBusyError",
    "SessionClosedError",
    "SessionState",
    "SessionsExhaustedError",
    "SettingError",
    "StateError",
    "StepCancelledError",
    "StepError",
    "SyncResult",
    "TensorError",
    "TextError",
    "Tokenizer",
    "UnsupportedModelError",
    "__version__",
    "eval_batch",
]
