"""Sampling maths: the drawn distribution, truncation against a sorting reference, keys, edge cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.rollout import sampling
from jaxrl.rollout.sampling import block_width, cutoff, invert_cdf, token_keys

draw = jax.jit(sampling.draw)


def knobs(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    as_row = lambda x, dtype: jnp.broadcast_to(jnp.asarray(x, dtype), (rows,))  # noqa: E731
    floats = jnp.float32
    return as_row(temperature, floats), as_row(top_k, jnp.int32), as_row(top_p, floats), as_row(min_p, floats)


def reference_kept(logits, top_k, top_p, min_p):
    """Sorting reference in float64 with the order of transformers; ties with the last kept token are kept."""
    kept = np.ones(logits.shape, bool)
    probabilities = np.exp(logits - logits.max())
    if top_k:
        kept &= logits >= np.sort(logits)[::-1][min(top_k, logits.size) - 1]
    if top_p < 1:
        left = np.where(kept, probabilities, 0)
        left /= left.sum()
        order = np.argsort(-left)
        last = order[np.searchsorted(np.cumsum(left[order]), top_p)]
        kept &= left >= left[last]
    return kept & (probabilities >= min_p)


@pytest.mark.parametrize("size", [1, 7, 192])
def test_inversion_on_a_grid_of_uniforms_gives_the_weights(size):
    weights = np.random.default_rng(size).gamma(0.5, size=size).astype(np.float32)
    grid = 2**20
    uniforms = (jnp.arange(grid, dtype=jnp.float32) + 0.5) / grid
    index = jax.jit(lambda u: jax.vmap(lambda u: invert_cdf(jnp.asarray(weights)[None], u[None])[0])(u))(
        uniforms
    )
    frequency = np.bincount(np.asarray(index), minlength=size) / grid
    # Half a grid step at either end of an interval, and the rounding of a float32 cumulative sum.
    np.testing.assert_allclose(frequency, weights / weights.astype(np.float64).sum(), atol=1.5e-6)


def test_zero_weights_are_never_returned():
    rng = np.random.default_rng(0)
    weights = rng.gamma(0.3, size=(4096, 256)).astype(np.float32) * (rng.random((4096, 256)) < 0.2)
    weights[:, 0] = weights[:, -1] = 0
    weights[0], weights[1, :] = 0, 0
    weights[1, 100] = 1e-30
    for value in (0.0, 1 - 2.0**-24, 1 - 2.0**-23, 2.0**-23, None):
        uniforms = rng.random(4096, dtype=np.float32) if value is None else np.full(4096, value, np.float32)
        index = np.asarray(jax.jit(invert_cdf)(weights, uniforms))
        assert (weights[np.arange(1, 4096), index[1:]] > 0).all()
        assert index[0] == 0 and index[1] == 100


def test_masked_tokens_are_never_drawn_at_the_edges_of_the_uniforms():
    logits = np.full((4, 1000), -np.inf, np.float32)
    logits[:, [3, 500, 997]] = [0.0, -1.0, -30.0]
    edges = [[0, 0], [1 - 2.0**-24] * 2, [0, 1 - 2.0**-24], [1 - 2.0**-24, 0]]
    got = draw(logits, jnp.asarray(edges, jnp.float32), *knobs(4))
    assert set(np.asarray(got.token).tolist()) <= {3, 500, 997}
    assert np.isfinite(got.logprob).all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ties", [False, True])
def test_kept_sets_equal_a_sorting_reference(seed, ties):
    rng = np.random.default_rng(seed)
    rows, vocab = 64, 300
    logits = (rng.standard_normal((rows, vocab)) * rng.choice([0.1, 1, 4], (rows, 1))).astype(np.float32)
    if ties:
        logits = np.round(logits * 2) / 2
    top_k = rng.choice([0, 1, 2, 17, 299, 300, 5000], rows).astype(np.int32)
    top_p = rng.choice([1.0, 1e-6, 0.37, 0.83, 0.999], rows).astype(np.float32)
    min_p = rng.choice([0.0, 0.013, 0.21, 1.0], rows).astype(np.float32)
    distance = logits.max(axis=1, keepdims=True) - logits
    cut = np.asarray(jax.jit(cutoff)(distance, top_k, top_p, min_p))
    for row in range(rows):
        expected = reference_kept(
            -distance[row].astype(np.float64), int(top_k[row]), float(top_p[row]), float(min_p[row])
        )
        np.testing.assert_array_equal(
            distance[row] <= cut[row], expected, err_msg=str((top_k[row], top_p[row], min_p[row]))
        )


def test_log_probabilities_are_those_of_both_distributions():
    rng = np.random.default_rng(1)
    logits = (3 * rng.standard_normal((6, 331))).astype(np.float32)  # prime: the blocks are padded
    temperature = np.array([0.7, 1.0, 1.3, 1.0, 0.2, 2.0], np.float32)
    settings = (
        temperature,
        np.array([0, 5, 0, 40, 0, 0], np.int32),
        np.array([1, 1, 0.8, 0.9, 1, 1], np.float32),
    )
    min_p = np.array([0, 0, 0, 0, 0.1, 0], np.float32)
    got = draw(logits, rng.random((6, 2), dtype=np.float32), *settings, min_p)
    scaled = logits.astype(np.float64) / temperature[:, None]
    for row in range(6):
        kept = reference_kept(scaled[row], int(settings[1][row]), float(settings[2][row]), float(min_p[row]))
        token = int(got.token[row])
        assert kept[token]
        weights = np.exp(scaled[row])
        np.testing.assert_allclose(got.logprob[row], np.log(weights[token] / weights[kept].sum()), atol=2e-6)
        np.testing.assert_allclose(got.policy_logprob[row], np.log(weights[token] / weights.sum()), atol=2e-6)


@pytest.mark.parametrize("setting", [{}, {"top_k": 9}, {"top_p": 0.8}, {"temperature": 1.7, "min_p": 0.05}])
def test_drawn_frequencies_pass_a_chi_square_test(setting):
    rows, vocab = 40000, 96
    logits = (2 * np.random.default_rng(3).standard_normal(vocab)).astype(np.float32)
    uniforms = jax.random.uniform(jax.random.key(5), (rows, 2))
    got = draw(jnp.broadcast_to(logits, (rows, vocab)), uniforms, *knobs(rows, **setting))
    scaled = logits.astype(np.float64) / setting.get("temperature", 1.0)
    kept = reference_kept(
        scaled, setting.get("top_k", 0), setting.get("top_p", 1.0), setting.get("min_p", 0.0)
    )
    expected = np.where(kept, np.exp(scaled), 0)
    expected *= rows / expected.sum()
    counts = np.bincount(np.asarray(got.token), minlength=vocab)
    assert counts[~kept].sum() == 0
    chi_square, freedom = ((counts - expected)[kept] ** 2 / expected[kept]).sum(), kept.sum() - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


def test_greedy_takes_the_first_best_token_beside_sampled_rows():
    logits = np.zeros((3, 640), np.float32)
    logits[:, [77, 400, 639]] = 5.0
    got = draw(logits, jnp.full((3, 2), 0.999), *knobs(3, [0.0, 1.0, 0.0], [0, 0, 5], [1.0, 1.0, 0.5]))
    assert np.asarray(got.token)[[0, 2]].tolist() == [77, 77] and int(got.token[1]) != 77
    assert np.asarray(got.logprob)[[0, 2]].tolist() == [0.0, 0.0]
    expected = 5 - np.log(637 + 3 * np.exp(5.0))
    np.testing.assert_allclose(np.asarray(got.policy_logprob)[[0, 2]], expected, atol=1e-6)


def test_non_finite_logits_are_visible_in_the_log_probabilities():
    logits = np.zeros((1, 64), np.float32)
    logits[0, 5] = np.nan
    got = draw(logits, jnp.full((1, 2), 0.5), *knobs(1))
    assert not np.isfinite(got.policy_logprob[0])
    assert 0 <= int(got.token[0]) < 64


def test_token_keys_fold_prompt_then_sample_then_position():
    run_key = jax.random.key(9)
    prompts, samples, positions = np.uint32([0, 7, 2**32 - 1]), np.uint32([3, 0, 1]), np.int32([5, 6, 7])
    keys = token_keys(run_key, prompts, samples, positions)
    for i in range(3):
        expected = run_key
        for number in (prompts[i], samples[i], positions[i]):
            expected = jax.random.fold_in(expected, number)
        np.testing.assert_array_equal(jax.random.key_data(keys[i]), jax.random.key_data(expected))


@pytest.mark.parametrize("vocab", [49152, 151936, 32000, 331, 17])
def test_block_width_divides_the_vocabulary_or_is_padded(vocab):
    width = block_width(vocab)
    assert 1 <= width <= max(vocab, 256)
    assert vocab % width == 0 or all(vocab % w for w in range(32, 2049))
