"""One process, eight simulated CPU devices, cheap compilation: set before JAX starts, inherited by subprocesses.

Tests spend their time in compilation, not in arithmetic. So XLA optimizes little, and a program that several
tests (or processes) build anew is compiled once per session, into a cache that goes away with it.
"""

import atexit
import importlib.metadata
import logging
import os
import shutil
import tempfile

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
_flags = os.environ.get("XLA_FLAGS", "")
_wanted = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
if importlib.metadata.version("jaxlib").startswith("0.10."):  # three times faster to compile; later XLA has no such flag
    _wanted.append("--xla_cpu_use_fusion_emitters=false")
for _flag in _wanted:
    if _flag.split("=")[0] not in _flags:
        _flags = f"{_flags} {_flag}".strip()
os.environ["XLA_FLAGS"] = _flags
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = tempfile.mkdtemp(prefix="jaxrl-tests-")
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


@pytest.fixture(autouse=True)
def root_logging():
    """The launcher sets up the root logger; its handler must not outlive the captured stream of its test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
