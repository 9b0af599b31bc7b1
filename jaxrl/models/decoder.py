"""The decoder-only transformer (Llama, SmolLM, Qwen2, Qwen2.5, Qwen3), and the static handle that steps use.

``Decoder`` is the flax nnx definition. ``LanguageModel`` builds its graph once and offers pure functions over plain
nested dicts of parameters; the merge of the two happens at trace time only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.errors import ConfigError
from jaxrl.models.config import ModelConfig
from jaxrl.models.layers import Block, Embedding, LayerCache, RMSNorm, rope_tables
from jaxrl.parallel.sharding import Axes, Sharding

Params = dict[str, Any]
Cache = tuple[LayerCache, ...]
Constrain = Callable[..., jax.Array]

#: Logical axes by the end of a parameter's path; stacked layers add "layers" in front.
PARAMETER_AXES: dict[str, Axes] = {
    "embed/embedding": ("vocab", "embed"),
    "head/embedding": ("vocab", "embed"),
    "q/kernel": ("embed", "heads"),
    "k/kernel": ("embed", "kv_heads"),
    "v/kernel": ("embed", "kv_heads"),
    "o/kernel": ("heads", "embed"),
    "gate/kernel": ("embed", "mlp"),
    "up/kernel": ("embed", "mlp"),
    "down/kernel": ("mlp", "embed"),
    "q/bias": ("heads",),
    "k/bias": ("kv_heads",),
    "v/bias": ("kv_heads",),
}


@functools.partial(jax.tree_util.register_dataclass, data_fields=["hidden", "extras"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Outputs:
    """Result of a forward pass.

    Attributes:
      hidden: ``[N, S, D]`` after the final norm, in the compute dtype; logits are ``hidden @ head.T``.
      extras: what ``want`` asked for; ``"layer:i"`` is the residual stream ``[N, S, D]`` after block i.
    """

    hidden: jax.Array
    extras: dict[str, jax.Array]


class Decoder(nnx.Module):
    """Embedding, blocks, final norm and head. ``layers`` is one stacked Block or a dict of Blocks by index."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embedding(config, rngs=rngs)
        if config.scan_layers:
            keys = jax.random.split(rngs.params(), config.num_layers)
            make = lambda key: Block(config, lora=config.lora is not None, rngs=nnx.Rngs(params=key))  # noqa: E731
            self.layers: Any = nnx.vmap(make)(keys)
        else:
            self.layers = nnx.Dict(
                {str(i): Block(config, lora=_has_lora(config, i), rngs=rngs) for i in range(config.num_layers)}
            )
        self.final_norm = RMSNorm(config, config.d_model)
        if not config.tie_embeddings:
            self.head = Embedding(config, rngs=rngs)

    def table(self) -> jax.Array:
        """Head ``[V, D]`` in the storage dtype."""
        return (self.embed if self.config.tie_embeddings else self.head).embedding[...]

    def lookup(self, tokens: jax.Array, constrain: Constrain) -> jax.Array:
        # Rows split over the vocabulary only: else the partitioner would move every looked-up row between axes.
        table = constrain(self.embed.embedding[...].astype(self.config.compute_dtype), "vocab", None)
        return constrain(table.at[tokens].get(mode="clip"), "batch", "seq", None)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, mask: jax.Array | None, want: tuple[str, ...], constrain: Constrain
    ) -> Outputs:
        c = self.config
        wanted = _wanted_layers(want, c.num_layers)
        rope = rope_tables(c, positions)
        x = self.lookup(tokens, constrain)

        def block(module: Block, x: jax.Array) -> jax.Array:
            return constrain(module(x, rope, mask), "batch", "seq", None)

        extras: dict[str, jax.Array] = {}
        if c.scan_layers:
            graphdef, stacked = nnx.split(self.layers)

            def body(carry: tuple[jax.Array, dict[str, jax.Array]], scanned: Any) -> tuple[Any, None]:
                (x, kept), (index, params) = carry, scanned
                x = block(nnx.merge(graphdef, params), x)
                kept = {name: jnp.where(index == wanted[name], x, old) for name, old in kept.items()}
                return (x, kept), None

            start = {name: jnp.zeros_like(x) for name in wanted}
            indices = jnp.arange(c.num_layers)
            (x, extras), _ = jax.lax.scan(_remat(body, c.remat), (x, start), (indices, stacked))
        else:
            for i in range(c.num_layers):
                graphdef, params = nnx.split(self.layers[str(i)])
                run = _remat(lambda params, x, graphdef=graphdef: block(nnx.merge(graphdef, params), x), c.remat)
                x = run(params, x)
                extras.update({name: x for name, index in wanted.items() if index == i})
        return Outputs(self.final_norm(x), extras)

    def cached(
        self, tokens: jax.Array, positions: jax.Array, cache: Cache, constrain: Constrain
    ) -> tuple[jax.Array, Cache]:
        c = self.config
        rope = rope_tables(c, positions)
        x = self.lookup(tokens, constrain)
        new_cache = []
        for i in range(c.num_layers):
            block = self.layers[str(i)]
            x, layer = block.cached(x, rope, cache[i], positions)
            new_cache.append(layer)
        return self.final_norm(x), tuple(new_cache)


def _has_lora(config: ModelConfig, layer: int) -> bool:
    if config.lora is None:
        return False
    last = config.lora.last_layers
    return last is None or layer >= config.num_layers - last


def _remat(function: Callable, mode: str) -> Callable:
    if mode == "none":
        return function
    policy = None if mode == "block" else jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(function, policy=policy)


def _wanted_layers(want: tuple[str, ...], num_layers: int) -> dict[str, int]:
    wanted = {}
    for name in want:
        kind, _, number = name.partition(":")
        try:
            index = int(number)
        except ValueError:
            index = num_layers
        if kind != "layer" or not -num_layers <= index < num_layers:
            raise ConfigError(f"want={name!r} is not an output; use 'layer:i' with -{num_layers} <= i < {num_layers}")
        wanted[name] = index % num_layers
    return wanted


def attention_mask(segment_ids: jax.Array) -> jax.Array:
    """``[N, 1, S, S]``, True where query and key are in the same segment (causality is applied elsewhere)."""
    return segment_ids[:, None, :, None] == segment_ids[:, None, None, :]


@functools.lru_cache(maxsize=64)
def _graph(config: ModelConfig) -> tuple[nnx.GraphDef, Params]:
    """Graph and abstract parameters of a decoder; tracing one of many unrolled layers takes seconds."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(params=jax.random.key(0)))))
    return graphdef, nnx.to_pure_dict(state)


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A static handle on a decoder: hashable, holds no arrays; every method is pure and may be jitted.

    Attributes:
      config: the architecture.
      sharding: where parameters and activations live; None leaves placement to JAX.
    """

    config: ModelConfig
    sharding: Sharding | None = None

    def _build(self, key: jax.Array) -> Decoder:
        return Decoder(self.config, rngs=nnx.Rngs(params=key))

    @property
    def _graph(self) -> tuple[nnx.GraphDef, Params]:
        return _graph(self.config)

    def abstract(self) -> Params:
        """The parameter tree as ShapeDtypeStructs, with shardings where the model has a mesh; no memory is used."""
        shapes = self._graph[1]
        if self.sharding is None:
            return shapes
        place = lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding)  # noqa: E731
        return jax.tree.map(place, shapes, self.param_shardings())

    def logical_axes(self) -> Params:
        """The parameter tree with a tuple of logical axis names at each leaf."""

        def axes(path: Any, leaf: jax.ShapeDtypeStruct) -> Axes:
            names = [p.key for p in path]
            if names[-1] == "lora_a":
                found: Axes = (PARAMETER_AXES[f"{names[-2]}/kernel"][0], None)
            elif names[-1] == "lora_b":
                found = (None, PARAMETER_AXES[f"{names[-2]}/kernel"][1])
            else:
                found = PARAMETER_AXES.get("/".join(names[-2:]), (None,))
            stacked = self.config.scan_layers and names[0] == "layers"
            return ("layers", *found) if stacked else found

        return jax.tree_util.tree_map_with_path(axes, self._graph[1])

    def param_shardings(self) -> Params:
        """NamedShardings of the parameters; needs ``sharding``."""
        return self.sharding.tree(self.logical_axes(), self._graph[1])

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters, created directly on their shards."""
        return self._init(key)

    @functools.cached_property
    def _init(self) -> Callable[[jax.Array], Params]:
        out = None if self.sharding is None else self.param_shardings()
        return jax.jit(lambda key: nnx.to_pure_dict(nnx.state(self._build(key))), out_shardings=out)

    def merge(self, params: Params) -> Decoder:
        """The nnx module with these parameters (at trace time, or for interoperation)."""
        graphdef, expected = self._graph
        if jax.tree.structure(params) != jax.tree.structure(expected):  # type: ignore[operator]
            have, need = (set(_paths(tree)) for tree in (params, expected))
            raise ConfigError(
                f"parameters do not fit the model: missing {sorted(need - have)[:4]}, unexpected {sorted(have - need)[:4]} "
                f"(scan_layers={self.config.scan_layers}; stack_layers and unstack_layers convert)"
            )
        return nnx.merge(graphdef, params)

    def _constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        return x if self.sharding is None else self.sharding.constrain(x, *axes)

    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        want: tuple[str, ...] = (),
    ) -> Outputs:
        """Hidden states of whole sequences.

        Args:
          params: nested dict as from ``init``.
          tokens: int32 ``[N, S]``.
          positions: int32 ``[N, S]`` for the rotary embedding; 0..S-1 when None.
          segment_ids: int32 ``[N, S]``; tokens attend within their own segment. None: one segment.
          want: extra outputs, ``"layer:i"`` (i may be negative).
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        mask = None if segment_ids is None else attention_mask(segment_ids)
        return self.merge(params)(tokens, positions, mask, want, self._constrain)

    def head(self, params: Params) -> jax.Array:
        """Output table ``[V, D]``; logits are ``hidden @ table.T``."""
        return params["embed" if self.config.tie_embeddings else "head"]["embedding"]

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """float32 (or wider) logits ``[..., V]`` of hidden states ``[..., D]``."""
        wide = jnp.promote_types(hidden.dtype, jnp.float32)
        table = self.head(params).astype(hidden.dtype)
        return jnp.einsum("...d,vd->...v", hidden, table, preferred_element_type=wide)

    def init_cache(self, batch: int, length: int) -> Cache:
        """An empty key/value cache: per layer k ``[B, K, d, C]`` and v ``[B, K, C, d]`` in the compute dtype."""
        c = self.config
        k_shape = (batch, c.num_kv_heads, c.head_dim, length)
        v_shape = (batch, c.num_kv_heads, length, c.head_dim)
        empty = lambda shape: jnp.zeros(shape, c.compute_dtype)  # noqa: E731
        return tuple({"k": empty(k_shape), "v": empty(v_shape)} for _ in range(c.num_layers))

    def cache_shardings(self, batch: int, length: int) -> Any:
        """NamedShardings of ``init_cache``: slots over the batch axes, key/value heads over the tensor axis."""
        shapes = jax.eval_shape(lambda: self.init_cache(batch, length))
        return jax.tree.map(lambda s: self.sharding.named(("batch", "kv_heads", None, None), s.shape), shapes)

    def forward_cached(
        self, params: Params, cache: Cache, tokens: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """Hidden states of new tokens that see, and are added to, a cache.

        Args:
          params: parameters with layers UNSTACKED (a decode step reads each weight once; a scan would copy it first).
          cache: as from ``init_cache``.
          tokens: int32 ``[B, T]``; T = 1 is a decode step, larger T a prefill of prompts or observations.
          positions: int32 ``[B, T]``: both rotary position and cache column; out-of-range columns are dropped.

        Returns:
          hidden ``[B, T, D]`` after the final norm, and the new cache.
        """
        return unrolled(self).merge(params).cached(tokens, positions, cache, self._constrain)


@functools.lru_cache(maxsize=64)
def unrolled(model: LanguageModel) -> LanguageModel:
    """The same model with ``scan_layers=False``."""
    if not model.config.scan_layers:
        return model
    return LanguageModel(model.config.replace(scan_layers=False), model.sharding)


def _paths(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in jax.tree_util.tree_leaves_with_path(tree)]


def stack_layers(params: Params) -> Params:
    """``layers/<i>/...`` to ``layers/...`` with a leading layer axis."""
    layers = params["layers"]
    blocks = [layers[str(i)] for i in range(len(layers))]
    return {**params, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}


def unstack_layers(params: Params, num_layers: int) -> Params:
    """``layers/...`` with a leading layer axis to ``layers/<i>/...``; unstacked input is returned as it is."""
    layers = params["layers"]
    if "0" in layers:
        return params
    return {**params, "layers": {str(i): jax.tree.map(lambda x: x[i], layers) for i in range(num_layers)}}  # noqa: B023
