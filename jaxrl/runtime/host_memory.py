"""Keep freed memory in the process: on CPU, XLA's large buffers are otherwise mapped and page-faulted at every step.

glibc hands allocations of more than 128 KiB to ``mmap`` and gives them back when freed, so each temporary of each step
costs a page fault per 4 KiB. On a 2-core virtual machine that made a [512, 49152] elementwise step 4 times, and a
matrix product with such a result 6 times, slower.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> bool:
    """Let glibc serve large blocks from its heap and never shrink the heap; returns whether that was possible.

    The process's resident size then stays at its peak. Has no effect outside Linux with glibc. Call it once, before
    the first large computation; ``jaxrl.launch`` does so on CPU.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, 64 * 2**20))
    return all(libc.mallopt(name, value) == 1 for name, value in settings)
