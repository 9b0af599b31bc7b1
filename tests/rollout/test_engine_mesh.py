"""The slot engine on a simulated (data, fsdp, tensor) mesh gives the tokens of one device."""

import jax
import numpy as np
import pytest

from engine_cases import ENGINE, TINY, make_requests
from jaxrl.errors import ConfigError
from jaxrl.models.decoder import LanguageModel, stack_layers
from jaxrl.parallel.mesh import MeshConfig, make_mesh
from jaxrl.parallel.sharding import Sharding
from jaxrl.rollout import Engine, EngineConfig
from jaxrl.rollout import decode as device

KEY = jax.random.key(42)


@pytest.fixture(scope="module")
def sharded():
    return LanguageModel(TINY, Sharding(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))))


def test_a_mesh_gives_the_tokens_of_one_device(model, params, sharded):
    requests = make_requests(prompts=3, samples=3)
    expected = Engine(model, ENGINE).generate(params, requests, KEY)
    placed = jax.device_put(stack_layers(params), sharded.param_shardings())
    engine = Engine(sharded, ENGINE)
    got = engine.generate(placed, requests, KEY)
    for one, many in zip(expected, got):
        np.testing.assert_array_equal(one.token_ids, many.token_ids)
        np.testing.assert_allclose(one.logprobs, many.logprobs, atol=1e-5)


def test_the_cache_is_split_over_slots_and_heads(sharded):
    cache, slots = device.programs(sharded, 4, 512).start(48, 8)
    keys = cache[0]["k"]
    assert keys.shape == (4, 2, 8, 48) and keys.sharding.shard_shape(keys.shape) == (1, 1, 8, 48)
    assert slots["tokens"].sharding.is_fully_replicated


@pytest.mark.parametrize("gather_weights, shard", [(True, (32, 32)), (False, (16, 32))])
def test_weights_are_gathered_over_the_batch_axes_on_request(sharded, gather_weights, shard):
    built = device.programs(sharded, 4, 512, gather_weights)
    placed = jax.eval_shape(sharded.init, KEY)
    kernel = built.prepare.lower(placed).out_info["layers"]["1"]["mlp"]["gate"]["kernel"]
    assert kernel.shape == (32, 64) and kernel.sharding.shard_shape(kernel.shape) == shard


def test_slots_must_divide_over_the_mesh(sharded):
    with pytest.raises(ConfigError, match="engine.slots of 6 rows"):
        Engine(sharded, EngineConfig(slots=6, max_prompt_len=16, max_len=48))
