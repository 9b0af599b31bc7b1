"""The decoder and the GRPO loss written once more in float64 NumPy, densely and row by row. Shares no code with jaxrl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def _norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def _rope(x: np.ndarray, theta: float) -> np.ndarray:
    """x ``[S, heads, d]``; pairs are (i, i + d/2)."""
    length, _, d = x.shape
    angle = np.arange(length)[:, None] / theta ** (np.arange(0, d, 2) / d)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def log_probabilities(
    params: Mapping[str, Any], config: Any, ids: np.ndarray, temperature: float
) -> np.ndarray:
    """log p(next token = v | ids[: t + 1]) for each t: ``[S, V]`` of one unpadded sequence."""
    d, heads, groups = config.head_dim, config.num_heads, config.num_heads // config.num_kv_heads
    x = params["embed"]["embedding"][ids]
    causal = np.tril(np.ones((len(ids), len(ids)), bool))
    for i in range(config.num_layers):
        layer = params["layers"][str(i)]
        y = _norm(x, layer["attn_norm"]["scale"], config.norm_eps)
        q, k, v = ((y @ layer["attn"][name]["kernel"]).reshape(len(ids), -1, d) for name in ("q", "k", "v"))
        q, k = _rope(q, config.rope_theta), _rope(k, config.rope_theta)
        out = np.empty_like(q)
        for h in range(heads):
            scores = q[:, h] @ k[:, h // groups].T / np.sqrt(d)
            out[:, h] = _softmax(np.where(causal, scores, -np.inf)) @ v[:, h // groups]
        x = x + out.reshape(len(ids), -1) @ layer["attn"]["o"]["kernel"]
        y = _norm(x, layer["mlp_norm"]["scale"], config.norm_eps)
        gate = y @ layer["mlp"]["gate"]["kernel"]
        x = (
            x
            + (gate / (1 + np.exp(-gate)) * (y @ layer["mlp"]["up"]["kernel"]))
            @ layer["mlp"]["down"]["kernel"]
        )
    x = _norm(x, params["final_norm"]["scale"], config.norm_eps)
    table = params["embed" if config.tie_embeddings else "head"]["embedding"]
    return np.log(_softmax(x @ table.T / temperature))


def rows(
    batch: Any, params: Mapping[str, Any], config: Any, temperature: float
) -> list[dict[str, np.ndarray]]:
    """Per row of an unpacked batch: streams at its loss tokens, log-probability and entropy included."""
    found = []
    for n in range(batch.tokens.shape[0]):
        at = np.flatnonzero(batch.loss_mask[n])
        log_p = log_probabilities(
            params, config, batch.tokens[n, : at[-1] + 1 if at.size else 1], temperature
        )
        row = {
            "logp": log_p[at - 1, batch.tokens[n, at]],
            "entropy": -(np.exp(log_p) * log_p).sum(-1)[at - 1],
        }
        for name in ("advantages", "old_logp", "ref_logp", "sampler_logp", "weights"):
            stream = getattr(batch, name)
            row[name] = None if stream is None else np.asarray(stream, np.float64)[n, at]
        found.append(row)
    return found


def loss(
    batch: Any,
    params: Mapping[str, Any],
    config: Any,
    *,
    temperature: float,
    clip_low: float,
    clip_high: float,
    kl_coef: float,
    entropy_coef: float,
    mode: str,
    columns: int,
    cap: float,
) -> float:
    """PPO clip x min(exp(old - sampler), cap) x weights + kl_coef * k3 - entropy_coef * H, aggregated by ``mode``."""
    data = rows(batch, params, config, temperature)
    live = [row for row in data if row["logp"].size]
    total = 0.0
    for row in live:
        ratio = np.exp(row["logp"] - row["old_logp"])
        a = row["advantages"]
        policy = np.maximum(-a * ratio, -a * np.clip(ratio, 1 - clip_low, 1 + clip_high))
        policy = policy * np.minimum(np.exp(row["old_logp"] - row["sampler_logp"]), cap) * row["weights"]
        x = row["logp"] - row["ref_logp"]
        per_token = policy + kl_coef * (np.exp(-x) + x - 1) - entropy_coef * row["entropy"]
        n = {
            "token-mean": sum(r["logp"].size for r in live),
            "seq-mean-token-mean": len(live) * row["logp"].size,
            "seq-mean-token-sum": len(live),
            "seq-mean-token-sum-norm": len(live) * columns,
            "sum-norm": len(live),
        }[mode]
        total += per_token.sum() / n
    return total
