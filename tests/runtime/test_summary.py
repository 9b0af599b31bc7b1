"""What a finished run prints, and the allocator setting of the launcher."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from rich.console import Console

from jaxrl.runtime import summary
from jaxrl.runtime.metrics import MetricsLog
from jaxrl.runtime.report import write_samples
from jaxrl.runtime.rundir import RunDir


def record(completion: str, correct: bool) -> dict:
    return {"prompt": "2 + [2]?", "decoding": "greedy", "completion": completion, "correct": correct}


@pytest.fixture
def folder(tmp_path):
    folder = RunDir(tmp_path / "run").create()
    log = MetricsLog(folder.metrics, keep_until=-1)
    log.write(0, {"eval/accuracy_greedy": 0.25, "eval/only_first": 1.0})
    log.write(1, {"reward": 0.5})
    log.write(2, {"eval/accuracy_greedy": 0.75})
    log.close()
    write_samples(folder, 0, [record("line\nbreak", False)])
    write_samples(folder, 2, [record("4", True)])
    folder.report.write_text("report")
    return folder


def test_shows_first_and_last_evaluation_samples_and_files(folder):
    console = Console(record=True, width=120, file=open("/dev/null", "w"))
    summary.show(folder, console)
    text = console.export_text()
    row = next(line for line in text.splitlines() if "accuracy_greedy" in line)
    assert "0.250" in row and "0.750" in row and "only_first" not in text
    assert "wrong line⏎break" in text and "right 4" in text and "2 + [2]?" in text
    assert f"report: {folder.report}" in text and "export" not in text


def test_a_run_without_evaluation_still_names_its_files(tmp_path):
    folder = RunDir(tmp_path / "run").create()
    log = MetricsLog(folder.metrics, keep_until=-1)
    log.write(1, {"reward": 0.5})
    log.close()
    folder.report.write_text("report")
    console = Console(record=True, width=200, file=open("/dev/null", "w"))
    summary.show(folder, console)
    assert console.export_text().strip() == f"report: {folder.report}"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc")
def test_large_blocks_stay_in_the_heap():
    """After the call a freed 64 MiB block is not returned: the next one causes no page faults."""
    program = """
import json, resource
from jaxrl.runtime.host_memory import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = b"x" * 2**26
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
plain = faults()
kept = keep_freed_memory()
faults()
print(json.dumps([plain, kept, faults()]))
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    plain, kept, after = json.loads(out.stdout)
    assert kept and plain > 1000 and after < plain / 10
