"""The slot engine: tokens, log-probabilities and flags, and independence of everything but the request."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine_cases import ENGINE, TINY, Characters, make_requests
from jaxrl.errors import ConfigError, DataError, NonFiniteError
from jaxrl.models.decoder import LanguageModel, stack_layers
from jaxrl.rollout import Engine, EngineConfig, Request, SamplingParams
from jaxrl.rollout import decode as device
from jaxrl.rollout.types import cache_ladder, ladder

KEY = jax.random.key(42)


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, ENGINE)


def tokens_of(completions):
    return {(c.prompt_id, c.sample_id): c.token_ids.tolist() for c in completions}


def with_params(request, **changes):
    return dataclasses.replace(request, params=dataclasses.replace(request.params, **changes))


def whole_log_softmax(model, params, request, completion):
    """Log-softmax ``[T, V]`` of a forward pass without a cache, for the completion's positions."""
    tokens = np.zeros((1, ENGINE.max_len), np.int32)
    row = np.concatenate([request.prompt_ids, completion.token_ids])
    tokens[0, : row.size] = row
    logits = whole_logits(model, params, tokens)[0] / request.params.temperature
    start = completion.prompt_len - 1
    return np.asarray(jax.nn.log_softmax(logits))[start : start + completion.token_ids.size]


@functools.partial(jax.jit, static_argnums=0)
def whole_logits(model, params, tokens):
    return model.logits(params, model.forward(stack_layers(params), tokens).hidden)


@pytest.mark.parametrize("setting", [{}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}])
def test_log_probabilities_equal_a_forward_pass(engine, model, params, setting):
    requests = make_requests(**setting)
    for request, got in zip(requests, engine.generate(params, requests, KEY)):
        expected = whole_log_softmax(model, params, request, got)
        expected = expected[np.arange(got.token_ids.size), got.token_ids]
        np.testing.assert_allclose(got.policy_logprobs, expected, atol=1e-5)
        if setting:
            assert (got.logprobs >= got.policy_logprobs).all() and (got.logprobs > got.policy_logprobs).any()
        else:
            np.testing.assert_allclose(got.logprobs, expected, atol=1e-5)
        assert got.logprobs.dtype == np.float32 and got.token_ids.dtype == np.int32


def test_greedy_takes_the_best_token_of_a_forward_pass(engine, model, params):
    requests = make_requests(prompts=2, samples=2, temperature=0.0)
    completions = engine.generate(params, requests, KEY)
    for request, got in zip(requests, completions):
        unit = with_params(request, temperature=1.0)
        expected = whole_log_softmax(model, params, unit, got)
        np.testing.assert_array_equal(expected.argmax(axis=1), got.token_ids)
        np.testing.assert_allclose(got.policy_logprobs, expected.max(axis=1), atol=1e-5)
        assert (got.logprobs == 0).all()
    assert completions[0].token_ids.tolist() == completions[1].token_ids.tolist()


def test_a_request_gives_the_same_tokens_in_any_company_and_order(engine, params):
    requests = make_requests(prompts=4, samples=4)
    requests = [with_params(r, max_tokens=3 + 5 * ((r.prompt_id + r.sample_id) % 4)) for r in requests]
    together = tokens_of(engine.generate(params, requests, KEY))
    order = np.random.default_rng(1).permutation(len(requests))
    shuffled = engine.generate(params, [requests[i] for i in order], KEY)
    assert [(c.prompt_id, c.sample_id) for c in shuffled] == [
        (requests[i].prompt_id, requests[i].sample_id) for i in order
    ]
    assert tokens_of(shuffled) == together
    for request in (requests[0], requests[6], requests[15]):
        alone = engine.generate(params, [request], KEY)
        assert together[request.prompt_id, request.sample_id] == alone[0].token_ids.tolist()
    assert len(set(map(tuple, together.values()))) == len(requests)


@pytest.mark.parametrize("changes", [{"decode_chunk": 1}, {"decode_chunk": 64, "refill_at": 3}])
def test_chunks_and_refills_do_not_change_tokens(engine, model, params, changes):
    requests = make_requests(prompts=3, samples=3)
    requests = [with_params(r, max_tokens=2 + 3 * r.sample_id) for r in requests]
    expected = tokens_of(engine.generate(params, requests, KEY))
    other = Engine(model, dataclasses.replace(ENGINE, **changes))
    assert tokens_of(other.generate(params, requests, KEY)) == expected


def test_prefill_in_pieces_equals_prefill_at_once(model, params):
    tokens = np.random.default_rng(0).integers(0, TINY.vocab_size, (3, 16)).astype(np.int32)
    lengths = np.array([4, 9, 16], np.int32)
    whole, pieces = (
        jax.jit(functools.partial(device.prefill, model, piece))(params, tokens, lengths)
        for piece in (512, 4)
    )
    np.testing.assert_allclose(whole.logits, pieces.logits, atol=1e-4)
    np.testing.assert_allclose(whole.cache[1]["v"], pieces.cache[1]["v"], atol=1e-5)
    np.testing.assert_allclose(
        whole.logits, whole_logits(model, params, tokens)[np.arange(3), lengths - 1], atol=1e-4
    )


def test_slot_count_and_cache_length_do_not_change_tokens(engine, model, params):
    requests = make_requests(prompts=3, samples=3)
    expected = tokens_of(engine.generate(params, requests, KEY))
    wide = EngineConfig(
        slots=7, max_prompt_len=16, max_len=64, prefill_batch=3, cache_buckets=(64,), eos_token_ids=()
    )
    assert tokens_of(Engine(model, wide).generate(params, requests, KEY)) == expected


def test_same_request_repeats_and_other_keys_differ(engine, params):
    request = make_requests(1, 1)[0]
    other_prompt = dataclasses.replace(request, prompt_id=9)
    other_sample = dataclasses.replace(request, sample_id=9)
    got = engine.generate(params, [request, request, other_prompt, other_sample], KEY)
    first, second, third, fourth = (c.token_ids.tolist() for c in got)
    assert first == second and len({tuple(x) for x in (first, third, fourth)}) == 3
    assert engine.generate(params, [request], jax.random.key(43))[0].token_ids.tolist() != first


def test_each_distinct_prompt_is_prefilled_once(engine, params):
    engine.generate(params, make_requests(prompts=5, samples=4), KEY)
    assert engine.stats.prefilled_prompts == 5 and engine.stats.prefills == 3
    interleaved = sorted(make_requests(prompts=5, samples=4), key=lambda r: r.sample_id)
    engine.generate(params, interleaved, KEY)
    assert engine.stats.prefilled_prompts == 5


def test_every_busy_slot_step_is_a_token(engine, params):
    completions = engine.generate(params, make_requests(prompts=5, samples=4), KEY)
    # The first token of each completion comes from the prefill.
    assert engine.stats.busy_slot_steps == sum(c.token_ids.size - 1 for c in completions)
    assert engine.stats.decode_steps * ENGINE.slots >= engine.stats.busy_slot_steps
    assert engine.stats.sampled_tokens == 5 * 4 * 20


def test_nothing_recompiles_for_other_settings_numbers_and_lengths(engine, params):
    engine.generate(params, make_requests(prompts=2, samples=2), KEY)
    compiled = []

    def listen(event, duration, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.jit(lambda x: x * 3)(jnp.ones(5))
    assert compiled  # the listener hears compilations
    del compiled[:]
    changed = dict(temperature=0.3, top_k=7, top_p=0.5, min_p=0.1, stop_token_ids=(1, 2, 3))
    mixed = make_requests(prompts=7, samples=1, max_tokens=9, seed=8, **changed)
    mixed += make_requests(prompts=1, samples=5, max_tokens=31, seed=9, temperature=0.0)
    engine.generate(params, mixed, jax.random.key(1), on_token=lambda request, tokens: None)
    engine.generate(params, mixed[:1], jax.random.key(2))
    assert compiled == []


def test_finish_flags_and_the_tokens_that_cause_them(model, params):
    requests = make_requests(prompts=3, samples=3)
    plain = Engine(model, ENGINE).generate(params, requests, KEY)
    eos, stop = int(plain[0].token_ids[4]), int(plain[4].token_ids[6])
    engine = Engine(model, dataclasses.replace(ENGINE, eos_token_ids=(eos,)))
    stopping = [with_params(r, stop_token_ids=(stop,)) for r in requests]
    reasons = set()
    for before, got in zip(plain, engine.generate(params, stopping, KEY)):
        ends = [i for i, t in enumerate(before.token_ids.tolist()) if t in (eos, stop)]
        length = ends[0] + 1 if ends else 20
        expected = {eos: "eos", stop: "stop"}[int(before.token_ids[ends[0]])] if ends else "length"
        assert got.finish_reason == expected
        np.testing.assert_array_equal(got.token_ids, before.token_ids[:length])
        np.testing.assert_allclose(got.logprobs, before.logprobs[:length], atol=1e-6)
        reasons.add(expected)
    assert reasons >= {"eos", "stop"}
    ignoring = [with_params(r, ignore_eos=True) for r in requests]
    assert tokens_of(engine.generate(params, ignoring, KEY)) == tokens_of(plain)


def test_eos_as_first_token_and_a_single_token(model, params):
    requests = make_requests(prompts=2, samples=4)
    plain = Engine(model, ENGINE).generate(params, requests, KEY)
    firsts = tuple({int(c.token_ids[0]) for c in plain})
    engine = Engine(model, dataclasses.replace(ENGINE, eos_token_ids=firsts))
    got = engine.generate(params, requests, KEY)
    assert [c.token_ids.tolist() for c in got] == [[int(c.token_ids[0])] for c in plain]
    assert {c.finish_reason for c in got} == {"eos"} and engine.stats.decode_steps == 0
    single = Engine(model, ENGINE).generate(params, [with_params(r, max_tokens=1) for r in requests], KEY)
    assert [c.token_ids.tolist() for c in single] == [c.token_ids.tolist() for c in got]
    assert {c.finish_reason for c in single} == {"length"}


def test_token_zero_inside_a_completion_is_a_token(engine, params):
    requests = make_requests(prompts=1, samples=40)
    completions = engine.generate(params, requests, KEY)
    with_zero = [c for c in completions if 0 in c.token_ids[:-1]]
    assert with_zero and all(c.token_ids.size == 20 for c in completions)


def test_stop_strings_cut_where_they_complete(model, params):
    tokenizer = Characters()
    config = dataclasses.replace(ENGINE, eos_token_ids=None)
    requests = [with_params(r, ignore_eos=True) for r in make_requests(prompts=2, samples=4)]
    plain = Engine(model, config, tokenizer).generate(params, requests, KEY)
    text = tokenizer.decode(plain[1].token_ids)
    stops = (text[6:9], text[13:15])  # the first of them crosses chunks of 5 tokens after the first
    results = []
    for chunk in (1, 5, 40):
        engine = Engine(model, dataclasses.replace(config, decode_chunk=chunk), tokenizer)
        streamed = {}

        def listen(request, tokens, streamed=streamed):
            streamed.setdefault((request.prompt_id, request.sample_id), []).extend(tokens.tolist())

        got = engine.generate(
            params, [with_params(r, stop_strings=stops) for r in requests], KEY, on_token=listen
        )
        for before, after in zip(plain, got):
            whole = tokenizer.decode(before.token_ids)
            ends = [whole.index(s) + len(s) for s in stops if s in whole]
            assert tokenizer.decode(after.token_ids) == whole[: min(ends, default=20)]
            assert after.finish_reason == ("stop" if ends else "length")
            assert after.logprobs.size == after.token_ids.size
        assert got[1].token_ids.size == 9
        assert streamed == tokens_of(got)
        results.append(tokens_of(got))
    assert results[0] == results[1] == results[2]


def test_streaming_comes_in_order_and_finishes_after_its_last_token(engine, params):
    events = []
    completions = engine.generate(
        params,
        make_requests(prompts=3, samples=3),
        KEY,
        on_finish=lambda request, completion: events.append((request, completion)),
        on_token=lambda request, tokens: events.append((request, tokens)),
    )
    for index, completion in enumerate(completions):
        mine = [
            what for request, what in events if (request.prompt_id, request.sample_id) == divmod(index, 3)
        ]
        assert mine[-1] is completion and len(mine) > 2
        np.testing.assert_array_equal(np.concatenate(mine[:-1]), completion.token_ids)


def test_abort_of_running_and_waiting_requests(engine, params):
    requests = make_requests(prompts=3, samples=3)
    expected = tokens_of(engine.generate(params, requests, KEY))
    calls = []

    def on_token(request, tokens):
        if not calls:
            engine.abort(0, 0)
            engine.abort(2, 2)
        calls.append(request)

    got = {(c.prompt_id, c.sample_id): c for c in engine.generate(params, requests, KEY, on_token=on_token)}
    running, waiting = got.pop((0, 0)), got.pop((2, 2))
    assert running.finish_reason == "abort" and 0 < running.token_ids.size < 20
    assert running.token_ids.tolist() == expected[0, 0][: running.token_ids.size]
    assert waiting.finish_reason == "abort" and waiting.token_ids.size == 0 == waiting.logprobs.size
    assert all(c.finish_reason == "length" and c.token_ids.tolist() == expected[k] for k, c in got.items())
    assert tokens_of(engine.generate(params, requests, KEY)) == expected  # the abort is over


def test_stacked_parameters_and_a_narrow_compute_dtype(engine, params):
    requests = make_requests(prompts=2, samples=2)
    expected = tokens_of(engine.generate(params, requests, KEY))
    assert tokens_of(engine.generate(stack_layers(params), requests, KEY)) == expected
    narrow = LanguageModel(TINY.replace(dtype="bfloat16", num_layers=1))
    made = narrow.init(jax.random.key(0))
    prepared = device.programs(narrow, 4, 512).prepare(made)
    assert prepared["layers"]["0"]["attn"]["q"]["kernel"].dtype == jnp.bfloat16
    assert prepared["final_norm"]["scale"].dtype == jnp.float32


def test_decode_works_in_place(model, params):
    built = device.programs(model, 4, 512)
    cache, slots = built.start(48, 8)
    arguments = (params, cache, slots, KEY, np.int32(3), np.int32(9))
    memory = built.decode.lower(*arguments).compile().memory_analysis()
    size = sum(x.nbytes for x in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes >= size  # the new cache is the old one
    built.decode(*arguments)
    assert all(x.is_deleted() for x in jax.tree.leaves((cache, slots)))


def test_errors_name_the_request_and_the_remedy(engine, model, params):
    request = make_requests(1, 1)[0]

    def refused(match, **changes):
        with pytest.raises(DataError, match=match):
            engine.generate(params, [dataclasses.replace(request, **changes)], KEY)

    refused(r"prompt_id=0, sample_id=0\) has a prompt of 17 tokens.*max_prompt_len=16", prompt_ids=[1] * 17)
    refused("max_len=48; lower max_tokens", params=SamplingParams(max_tokens=46))
    refused("outside the vocabulary of 97", prompt_ids=[1, 97])
    refused("max_stop_ids=8", params=SamplingParams(max_tokens=2, stop_token_ids=range(9)))
    refused("tokenizer=", params=SamplingParams(max_tokens=2, stop_strings=("x",)))
    with pytest.raises(DataError, match="non-empty"):
        Request([], 0, 0, SamplingParams(max_tokens=2))
    with pytest.raises(DataError, match="prompt_id=-1"):
        Request([1], -1, 0, SamplingParams(max_tokens=2))
    for bad in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"min_p": 2.0}, {"max_tokens": 0}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            SamplingParams(**{"max_tokens": 1, **bad})
    with pytest.raises(ConfigError, match="max_position"):
        Engine(model, EngineConfig(max_prompt_len=16, max_len=257))
    with pytest.raises(ConfigError, match="no room"):
        EngineConfig(max_prompt_len=16, max_len=16)
    with pytest.raises(ConfigError, match="prompt_buckets"):
        EngineConfig(max_prompt_len=16, max_len=32, prompt_buckets=(8, 4, 16))
    broken = {**params, "final_norm": {"scale": params["final_norm"]["scale"] * np.nan}}
    with pytest.raises(NonFiniteError, match=r"prompt_id=0, sample_id=0\) at position"):
        engine.generate(broken, [request], KEY)
    assert engine.generate(params, [], KEY) == []


def test_buckets_cover_every_length():
    config = EngineConfig(max_prompt_len=100, max_len=300)
    assert ladder(100) == (16, 32, 64, 100) and cache_ladder(300) == (32, 48, 64, 96, 128, 192, 256, 300)
    for length in range(1, 101):
        assert config.prompt_bucket(length) >= length
    for length in range(1, 301):
        assert config.cache_bucket(length) >= length
