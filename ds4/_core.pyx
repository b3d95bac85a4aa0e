# distutils: language = c
"""Sessions, KV-cache bookkeeping, step planning and sampling: all of an engine that is not arithmetic.

This module owns which slab and pages belong to whom, whether a step is allowed, and whether it happened. It refuses
to know what a page contains: bytes and kernels belong to the backend's runner (ds4.backend.contract).

Everything here runs with the GIL unless it says otherwise, so the GIL is what protects the page pool and the busy
marks; the engine's lock, taken around a whole step, is what keeps two steps off the device.
"""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.object cimport PyObject
from libc.math cimport INFINITY, exp, isfinite, isnan, log
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy, memmove
from posix.unistd cimport getpid

import os
import threading
import weakref
from time import perf_counter

import numpy as np

from ds4.backend.guard import said
from ds4.backend.layout import PAGE_TOKENS
from ds4.backend.observe import StepRecord
from ds4.errors import (
    BackendError,
    BatchError,
    ContextLimitError,
    DeviceLostError,
    ForkedProcessError,
    NoLogitsError,
    NumericError,
    PagesExhaustedError,
    RewindError,
    SamplingError,
    SessionBusyError,
    SessionClosedError,
    SessionsExhaustedError,
    StateError,
    StepCancelledError,
    StepError,
)
from ds4.sampling import SamplingParams
from ds4.snapshot import SessionState, require_same

__all__ = ["DecodeItem", "EngineCore", "KVCache", "Session", "StepPlan", "SyncResult"]

cdef extern from "Python.h":  # with borrowed references, so that looking does not count
    PyObject *PyList_GET_ITEM(object, Py_ssize_t)
    Py_ssize_t Py_REFCNT(PyObject *)

cdef enum:
    PAGE = 256
    KEPT_BLOCKS = 3  # logits: the last step's, this one's, and one that a user holds on to
    KEPT_BLOCK_BYTES = 64 << 20

if PAGE != PAGE_TOKENS:
    raise ImportError("ds4._core was built for another page size than ds4.backend.layout; build it again")


cdef inline Py_ssize_t pages_for(Py_ssize_t n_tokens) noexcept nogil:
    return (n_tokens + PAGE - 1) // PAGE


include "core/kvcache.pxi"
include "core/plan.pxi"
include "core/tokens.pxi"
include "core/sampler.pxi"
include "core/session.pxi"
include "core/engine.pxi"
include "core/transfer.pxi"
