"""Per-token estimators of KL(policy || reference), and the adaptive coefficient."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl.ops._checks import check_choice, check_number
from jaxrl.ops.numerics import clamp, straight_through

KL_ESTIMATORS = ("k1", "abs", "k2", "k3", "k3_clamped", "k1+", "k3+")


def kl_penalty(
    estimator: str, logp: jax.Array, ref_logp: jax.Array, clamp_value: float | None = None
) -> jax.Array:
    """KL estimate per sampled token, elementwise, in the shape and dtype of ``logp``.

    With x = logp - ref_logp (http://joschu.net/blog/kl-approx.html):

    ========== ============================== =====================
    name       value                          d value / d logp
    ========== ============================== =====================
    k1         x                              1
    abs        abs(x)                         sign(x), 0 at 0
    k2         x^2 / 2                        x
    k3         exp(-x) + x - 1                1 - exp(-x)
    k3_clamped k3 with -x in [-20, 20] and    as k3, 0 where a
               the value in [-10, 10]         clamp binds
    k1+, k3+   k1, k3_clamped                 x
    ========== ============================== =====================

    k1 and k3 are unbiased for the value, but only the gradient of k2 is unbiased for the gradient of the KL when
    sampled tokens are held fixed; the ``+`` forms combine the two (straight-through, as in verl).

    Args:
      estimator: one of ``KL_ESTIMATORS``.
      logp: log-probabilities under the policy; carries the gradient.
      ref_logp: log-probabilities under the reference.
      clamp_value: if set, the value is clamped to [-clamp_value, clamp_value] (tunix).
    """
    check_choice("kl_penalty", "estimator", estimator, KL_ESTIMATORS)
    check_number("kl_penalty", "clamp_value", clamp_value, above=0.0, optional=True)
    x = jnp.asarray(logp) - jax.lax.stop_gradient(jnp.asarray(ref_logp))
    if estimator in ("k1", "k1+"):
        value = x
    elif estimator == "abs":
        value = x * jax.lax.stop_gradient(jnp.sign(x))  # jnp.abs has gradient 1 at 0
    elif estimator == "k2":
        value = 0.5 * x**2
    elif estimator == "k3":
        value = jnp.expm1(-x) + x
    else:
        bounded = clamp(x, -20.0, 20.0)
        value = clamp(jnp.expm1(-bounded) + bounded, -10.0, 10.0)
    if estimator.endswith("+"):
        value = straight_through(value, 0.5 * x**2)
    return value if clamp_value is None else clamp(value, -clamp_value, clamp_value)


def adapt_kl_coef(coef: float, kl: float, target: float, horizon: float, num_rows: int) -> float:
    """Next KL coefficient of the proportional controller of Ziegler et al. (arXiv 1909.08593), as in verl.

    ``coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_rows / horizon)``

    Args:
      coef: coefficient in use.
      kl: measured KL, mean over rows of the row's mean over loss tokens.
      target: wanted KL, > 0.
      horizon: rows over which the coefficient may change by 20 %, > 0.
      num_rows: rows of this batch.
    """
    check_number("adapt_kl_coef", "target", target, above=0.0)
    check_number("adapt_kl_coef", "horizon", horizon, above=0.0)
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * num_rows / horizon)
