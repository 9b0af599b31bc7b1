"""The recompilation guard names the function and the argument that changed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxrl.runtime import compilation
from jaxrl.runtime.compilation import RecompilationError, RecompilationGuard

ROWS = [np.ones((2, n), np.float32) for n in range(8)]


def make():
    def train_step(state, batch, *, scale=1):
        return {"w": state["w"] + scale * batch["tokens"].sum()}

    return compilation.jit(train_step, static_argnames="scale", donate_argnums=0)


def state():
    return {"w": np.zeros(3, np.float32)}


def test_changed_shape_is_reported_with_path_and_both_shapes():
    step = make()
    with RecompilationGuard("error") as guard:
        for _ in range(3):
            step(state(), {"tokens": ROWS[4]})
        guard.end_warm_up()
        step(state(), {"tokens": ROWS[4]})
        guard.check("step 4")
        step(state(), {"tokens": ROWS[5]})
        expected = (
            r"step 5: train_step .*batch\['tokens'\] changed from float32\[2, 4\] to float32\[2, 5\].*pad"
        )
        with pytest.raises(RecompilationError, match=expected):
            guard.check("step 5")
        assert guard.compilations["train_step"] == 2


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        ({"tokens": ROWS[4].astype(np.int32)}, {}, "from float32[2, 4] to int32[2, 4]"),
        ({"tokens": ROWS[4]}, {"scale": 2}, "argument scale is new (static 2)"),
        ({"tokens": ROWS[4], "mask": ROWS[4]}, {}, "argument batch['mask'] is new (float32[2, 4])"),
    ],
)
def test_other_changes(batch, options, message):
    step = make()
    step(state(), {"tokens": ROWS[4]})  # compiled before the guard, by a system that warms up itself
    with RecompilationGuard() as guard:
        guard.end_warm_up()
        step(state(), batch, **options)
    assert len(guard.reports) == 1 and message in str(guard.reports[0])


def test_changed_sharding():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = jnp.ones((8, 2))
    step = compilation.jit(lambda x: x * 2, name="double")
    with RecompilationGuard() as guard:
        step(jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))))
        split = jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
        guard.end_warm_up()
        step(split)
    assert "argument x changed from float32[8, 2] on NamedSharding" in str(guard.reports[0])


def test_unwatched_function_is_named():
    plain = jax.jit(lambda x: x + 1)
    with RecompilationGuard() as guard:
        plain(ROWS[1])
        guard.end_warm_up()
        plain(ROWS[2])
    assert [r.function for r in guard.reports] == ["jit(<lambda>)"]
    assert "compilation.jit" in str(guard.reports[0])


def test_first_compilation_and_expected_ones_are_not_reported():
    step = make()
    with RecompilationGuard("error") as guard:
        guard.end_warm_up()
        step(state(), {"tokens": ROWS[1]})
        with guard.expected():
            step(state(), {"tokens": ROWS[2]})
        guard.check("step 1")
    assert guard.reports == []


def test_warnings_are_limited_per_function(caplog):
    step = make()
    with RecompilationGuard("warn") as guard:
        step(state(), {"tokens": ROWS[0]})
        guard.end_warm_up()
        for n in range(1, 7):
            step(state(), {"tokens": ROWS[n]})
            guard.check(f"step {n}")
    assert len(guard.reports) == 6 and caplog.text.count("train_step compiled again") == 3


def test_off_listens_to_nothing():
    step = make()
    with RecompilationGuard("off") as guard:
        step(state(), {"tokens": ROWS[1]})
        guard.end_warm_up()
        step(state(), {"tokens": ROWS[2]})
        guard.check("step 1")
    assert guard.reports == [] and not guard.compilations


def test_wrapper_offers_what_jit_offers():
    step = make()
    lowered = step.lower(state(), {"tokens": ROWS[4]})
    assert "float32" in str(lowered.out_info) and step.__name__ == "train_step"
    result = lowered.compile()(state(), {"tokens": ROWS[4]})
    assert float(result["w"][0]) == 8.0
