"""How many threads the CPU backend uses when nobody says: one per physical core this process may run on."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

CPU_SYSFS = Path("/sys/devices/system/cpu")
CGROUP_MAX = Path("/sys/fs/cgroup/cpu.max")


def usable_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def linux_cores(cpus: set[int], sysfs: Path = CPU_SYSFS) -> int:
    """Distinct cores among `cpus`: hyper-threads of one core list the same siblings."""
    siblings = set()
    for cpu in cpus:
        try:
            siblings.add((sysfs / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip())
        except OSError:  # no topology in this container or virtual machine: count the CPU itself
            siblings.add(f"cpu {cpu}")
    return len(siblings)


def quota(path: Path = CGROUP_MAX) -> int | None:
    """Whole CPUs of a control group's limit, None without one. More threads would only wait for each other."""
    try:
        limit, period = path.read_text().split()[:2]
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(1, int(limit) // int(period))


def macos_cores() -> int | None:
    """Performance cores where the machine has two kinds, else physical cores."""
    libc = ctypes.CDLL(None)
    for name in (b"hw.perflevel0.physicalcpu", b"hw.physicalcpu"):
        value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
        if libc.sysctlbyname(name, ctypes.byref(value), ctypes.byref(size), None, 0) == 0 and value.value > 0:
            return value.value
    return None


def default_threads() -> int:
    cpus = usable_cpus()
    cores = (macos_cores() if sys.platform == "darwin" else linux_cores(cpus)) or len(cpus)
    return max(1, min(cores, len(cpus), quota() or len(cpus)))
