"""Checkpoints: exact bits, shardings, fall back from broken files, clear refusals."""

from __future__ import annotations

import logging
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxrl.errors import CheckpointError
from jaxrl.runtime.checkpoint import Checkpointer, load_arrays
from jaxrl.runtime.checksum import checksums
from jaxrl.runtime.state import RunState, TrainState

MESH = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
SPLIT = NamedSharding(MESH, PartitionSpec("data", "tensor"))


def make_state(seed: int = 0) -> RunState:
    params = {
        "dense": {"kernel": jax.device_put(jax.random.normal(jax.random.key(seed), (8, 4)), SPLIT)},
        "low": {"kernel": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3) + seed},
        "flags": jnp.array([True, False]),
        "odd": jnp.array([jnp.nan, -0.0, jnp.inf, 1e-40], jnp.float32),
    }
    frozen = {"base": {"kernel": jnp.ones((64, 64))}}
    device = TrainState(
        jnp.int32(7), params, frozen, (jnp.zeros(3), None, ()), jax.random.key(seed + 1, impl="rbg")
    )
    return RunState(device, {"position": 12, "nested": {"ema": 0.1 + 0.2, "list": [1, None, "x"]}})


def bits(x: jax.Array) -> np.ndarray:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.frombuffer(np.ascontiguousarray(np.asarray(x)).tobytes(), np.uint8)


def test_restore_gives_the_same_bits_dtypes_shardings_and_host(tmp_path):
    state = make_state()
    Checkpointer(tmp_path, asynchronous=False).save(state, 3)
    restored, step = Checkpointer(tmp_path).restore(make_state(seed=5))
    assert step == 3
    assert restored.host == state.host
    assert jax.tree.structure(restored.device) == jax.tree.structure(state.device)
    for x, y in zip(jax.tree.leaves(state.device), jax.tree.leaves(restored.device), strict=True):
        assert x.dtype == y.dtype and x.committed == y.committed and np.array_equal(bits(x), bits(y))
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
    # The restored key continues the same random stream.
    assert np.array_equal(
        jax.random.normal(state.device.key, (3,)), jax.random.normal(restored.device.key, (3,))
    )
    # Uncommitted and sharded leaves can be used in one computation, as before the restore.
    jax.jit(lambda s: s.params["dense"]["kernel"] * s.step)(restored.device)


def test_restore_onto_another_sharding(tmp_path):
    state = make_state()
    Checkpointer(tmp_path, asynchronous=False).save(state, 1)
    template = make_state()
    other = NamedSharding(MESH, PartitionSpec("tensor"))
    template.device.params["dense"]["kernel"] = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=other)
    restored, _ = Checkpointer(tmp_path).restore(template)
    kernel = restored.device.params["dense"]["kernel"]
    assert kernel.sharding.is_equivalent_to(other, 2)
    assert np.array_equal(kernel, state.device.params["dense"]["kernel"])


def test_asynchronous_save_is_not_affected_by_donation(tmp_path):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros((512, 512))
    checkpointer = Checkpointer(tmp_path, keep=4)
    for i in range(4):
        checkpointer.save(RunState({"x": x}, {}), i)
        x = step(x)
    checkpointer.close()
    for i in range(4):
        assert np.all(np.asarray(load_arrays_root(tmp_path, i)) == i)


def load_arrays_root(folder, step):
    reader = Checkpointer(folder)
    return reader._steps.read_arrays(step, {"x": jax.ShapeDtypeStruct((512, 512), jnp.float32)})["x"]


@pytest.mark.parametrize("damage", ["truncate", "remove", "flip"])
@pytest.mark.parametrize("target", ["state/d/*", "record/metadata", "state/manifest.ocdbt"])
def test_broken_newest_falls_back_to_the_one_before(tmp_path, caplog, damage, target):
    writer = Checkpointer(tmp_path, asynchronous=False)
    for step in (1, 2):
        writer.save(make_state(step), step)
    writer.close()
    (file,) = (tmp_path / "checkpoints" / "2").glob(target)
    data = bytearray(file.read_bytes())
    if damage == "truncate":
        file.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        data[len(data) // 2] ^= 0xFF
        file.write_bytes(data)
    else:
        file.unlink()
    checkpointer = Checkpointer(tmp_path)
    with caplog.at_level(logging.WARNING, "jaxrl"):
        restored, step = checkpointer.restore(make_state())
    assert step == 1 and "checkpoint of step 2 cannot be read" in caplog.text
    assert np.array_equal(
        restored.device.params["low"]["kernel"], make_state(1).device.params["low"]["kernel"]
    )
    checkpointer.save(make_state(2), 2)  # the broken one is out of the way
    checkpointer.close()
    assert Checkpointer(tmp_path).restore(make_state())[1] == 2


def test_wrong_values_in_a_readable_file_are_found(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path, asynchronous=False)
    checkpointer.save(make_state(), 1)
    real = checkpointer._steps.read_arrays

    def swapped(step, abstract):
        arrays = real(step, abstract)
        odd = arrays["params/odd"]
        arrays["params/odd"] = odd.at[jnp.array([0, 2])].set(odd[jnp.array([2, 0])])
        return arrays

    monkeypatch.setattr(checkpointer._steps, "read_arrays", swapped)
    with pytest.raises(CheckpointError, match="params/odd does not have the checksum"):
        checkpointer.restore(make_state())
    assert checkpointer.steps == [1]  # nothing is set aside when nothing else can be read


def test_interrupted_write_is_ignored(tmp_path):
    Checkpointer(tmp_path, asynchronous=False).save(make_state(), 1)
    (tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    assert Checkpointer(tmp_path).restore(make_state())[1] == 1
    assert not (tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp").exists()


def test_other_structure_is_refused_by_path_and_shape(tmp_path):
    Checkpointer(tmp_path, asynchronous=False).save(make_state(), 1)
    wider = make_state()
    wider.device.params["low"]["kernel"] = jnp.zeros((2, 5), jnp.bfloat16)
    with pytest.raises(
        CheckpointError, match=r"params/low/kernel as bfloat16\[2, 3\].*needs bfloat16\[2, 5\]"
    ):
        Checkpointer(tmp_path).restore(wider)
    extra = make_state()
    extra.device.params["lows"] = jnp.zeros(1)
    with pytest.raises(CheckpointError, match="has no params/lows"):
        Checkpointer(tmp_path).restore(extra)
    fewer = make_state()
    del fewer.device.params["odd"]
    with pytest.raises(CheckpointError, match="holds params/odd, which this run does not have"):
        Checkpointer(tmp_path).restore(fewer)
    assert Checkpointer(tmp_path).steps == [1]


def test_frozen_arrays_are_written_once_and_must_not_change(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=3, asynchronous=False)
    for step in (1, 2, 3):
        checkpointer.save(make_state(), step)
    assert checkpointer._frozen.steps() == [0]
    for step in (1, 2, 3):
        names = (tmp_path / "checkpoints" / str(step) / "state" / "_METADATA").read_text()
        assert "frozen" not in names and "params/dense/kernel" in names
    changed = make_state()
    changed.device.frozen["base"]["kernel"] = changed.device.frozen["base"]["kernel"].at[3, 4].add(1)
    with pytest.raises(CheckpointError, match="frozen/base/kernel has changed"):
        checkpointer.save(changed, 4)


def test_disk_full_keeps_what_was_there_and_the_next_save_works(tmp_path):
    rng = np.random.default_rng(0)
    small, big = ({"x": jnp.asarray(rng.normal(size=n), jnp.float32)} for n in (100, 400_000))
    checkpointer = Checkpointer(tmp_path, keep=5)
    checkpointer.save(RunState(small, {}), 1)
    checkpointer.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (100_000, hard)
    )  # a write beyond 100 kB fails, as on a full disk
    try:
        with pytest.raises(
            CheckpointError, match=r"step 2 could not be written.*earlier.*intact.*disk is full"
        ):
            checkpointer.save(RunState(big, {}), 2)
            checkpointer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpointer.steps == [1]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [
        "1"
    ]  # the torn write gave its space back
    checkpointer.save(RunState(small, {}), 3)
    checkpointer.close()
    restored, step = Checkpointer(tmp_path).restore(RunState(small, {}))
    assert step == 3 and np.array_equal(restored.device["x"], small["x"])


@pytest.mark.parametrize(
    ("host", "culprit"),
    [
        ({"a": (1, 2)}, r"state.host\['a'\] is a tuple"),
        ({"a": [np.float32(1)]}, r"state.host\['a'\]\[0\] is a float32"),
        ({"a": {3: 4}}, "has the key 3"),
    ],
)
def test_host_state_that_json_would_change_is_refused(tmp_path, host, culprit):
    with pytest.raises(CheckpointError, match=culprit):
        Checkpointer(tmp_path).save(RunState({"x": jnp.zeros(1)}, host), 1)


def test_host_state_is_copied_at_the_time_of_the_save(tmp_path):
    host = {"list": [1]}
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(RunState({"x": jnp.zeros(1)}, host), 1)
    host["list"].append(2)
    checkpointer.wait()
    assert checkpointer.restore(RunState({"x": jnp.zeros(1)}, {}))[0].host == {"list": [1]}


def test_load_arrays_of_a_branch(tmp_path):
    state = make_state()
    Checkpointer(tmp_path, asynchronous=False).save(state, 4)
    params = load_arrays(tmp_path)
    assert set(params) == {"dense", "low", "flags", "odd"}
    assert np.array_equal(params["dense"]["kernel"], state.device.params["dense"]["kernel"])
    assert load_arrays(tmp_path, prefix="frozen")["base"]["kernel"].shape == (64, 64)
    with pytest.raises(CheckpointError, match="did you mean 'params'"):
        load_arrays(tmp_path, prefix="param")
    with pytest.raises(CheckpointError, match="no checkpoint of step 9"):
        load_arrays(tmp_path, step=9)


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int8", "uint32", "bool", "float8_e4m3fn", "int4"]
)
def test_checksum_sees_one_bit_and_ignores_the_sharding(dtype):
    values = np.random.default_rng(0).integers(0, 2, size=(8, 4))
    x = jnp.asarray(values, dtype)
    whole = checksums({"x": x})
    assert checksums({"x": jax.device_put(x, SPLIT)}) == whole
    flipped = values.copy()
    flipped[5, 2] = 1 - flipped[5, 2]
    swapped = values[[1, 0, *range(2, 8)]]
    assert not np.array_equal(swapped, values)
    for other in (flipped, swapped):
        assert checksums({"x": jnp.asarray(other, dtype)}) != whole


def test_load_arrays_leaves_typed_keys_out(tmp_path):
    """A branch that holds a key, as the train state of a system does, can be read all the same."""
    state = make_state()
    checkpointer = Checkpointer(tmp_path, asynchronous=False)
    checkpointer.save(RunState({"train": state.device}, {}), 1)
    checkpointer.close()
    train = load_arrays(tmp_path, prefix="train")
    assert "key" not in train and int(train["step"]) == 7
    np.testing.assert_array_equal(train["params"]["flags"], state.device.params["flags"])
