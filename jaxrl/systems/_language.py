"""What every language-model system sets up the same way: model, tokenizer, prompts, trainable part, optimizer."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxrl.data.char_tokenizer import CharTokenizer
from jaxrl.data.chat import CHATML_TEMPLATE, prompt_encoder
from jaxrl.data.pipeline import encode_prompts
from jaxrl.data.prompts import PromptExample
from jaxrl.errors import ConfigError
from jaxrl.models.decoder import LanguageModel, Params
from jaxrl.models.hf import save_hf
from jaxrl.models.load import ModelSource, open_model
from jaxrl.models.lora import trainable_predicate
from jaxrl.models.tokenizer import check_tokenizer
from jaxrl.parallel.sharding import Sharding
from jaxrl.parallel.trees import combine, partition
from jaxrl.runtime import compilation
from jaxrl.runtime.config import field
from jaxrl.runtime.optimizer import OptimizerConfig, make_optimizer
from jaxrl.runtime.state import TrainState, count_parameters

logger = logging.getLogger("jaxrl")

#: ``model.tokenizer`` of this form is a character tokenizer of the alphabet that follows.
CHARACTERS = "chars:"


@dataclasses.dataclass(frozen=True)
class PromptFormat:
    """How a prompt becomes tokens."""

    max_prompt_len: int = field(256, "longest prompt in tokens")
    on_long: Literal["drop", "error"] = field("drop", "what to do with longer prompts: drop (and report) or error")
    system: str | None = field(None, "system message put first")
    chat_template: str | None = field(
        None, "Jinja chat template instead of the tokenizer's own; 'chatml' is one without a default system message"
    )

    def validate(self) -> None:
        if self.on_long not in ("drop", "error"):
            raise ConfigError(f"on_long is {self.on_long!r}; use 'drop' or 'error'")

    def template(self) -> str | None:
        return CHATML_TEMPLATE if self.chat_template == "chatml" else self.chat_template

    def encode(self, tokenizer: Any, examples: list[PromptExample], what: str) -> list[PromptExample]:
        """Examples with ``prompt_ids``; says what was dropped."""
        encode = prompt_encoder(tokenizer, self.system, self.template())
        kept, report = encode_prompts(examples, encode, self.max_prompt_len, self.on_long)
        logger.info("%s: %s", what, report)
        return kept


@dataclasses.dataclass(frozen=True)
class Setup:
    """A model ready to train.

    Attributes:
      model: static handle.
      tokenizer: as loaded, or as given by the system.
      load: key -> parameters (from the weights file, or fresh).
      trainable: predicate over parameter paths.
      optimizer: optax transformation.
      sharding: None on one device.
    """

    model: LanguageModel
    tokenizer: Any
    load: Callable[[jax.Array], Params]
    trainable: Callable[[tuple[str, ...]], bool]
    optimizer: optax.GradientTransformation
    sharding: Sharding | None

    def init(self, key: jax.Array) -> TrainState:
        """Fresh train state: parameters split into trainable and frozen, optimizer state on the same shards."""
        load_key, run_key = jax.random.split(key)
        params, frozen = partition(self.load(load_key), self.trainable)
        if not params:
            raise ConfigError("no parameter is trainable; check `trainable` and `model.lora`")
        state = TrainState.create(params, self.optimizer, run_key, frozen)
        # Moments lie beside their parameters, scalars and keys on every device of the mesh.
        return state if self.sharding is None else jax.device_put(state, self.state_shardings())

    def state_shardings(self) -> TrainState | None:
        """Shardings of the train state, for ``out_shardings`` of its step; None on one device."""
        if self.sharding is None:
            return None
        everywhere = self.sharding.replicate()
        params, frozen = partition(self.model.param_shardings(), self.trainable)
        abstract, _ = partition(self.model.abstract(), self.trainable)
        opt_state = optax.tree.map_params(
            self.optimizer,
            lambda _, sharding: sharding,
            jax.eval_shape(self.optimizer.init, abstract),
            params,
            transform_non_params=lambda _: everywhere,
        )
        return TrainState(everywhere, params, frozen, opt_state, everywhere)  # type: ignore[arg-type]

    def jit_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """``(state, batch, ...) -> (state, metrics)`` compiled: state donated, and returned on the shards it came on."""
        options = {} if self.sharding is None else {"out_shardings": (self.state_shardings(), self.sharding.replicate())}
        return compilation.jit(step, name="train_step", donate_argnums=0, **options)

    def export(self, state: TrainState, run_dir: str | pathlib.Path) -> None:
        """Write the model, adapters merged, as a Hugging Face directory ``run_dir/export``.

        A tokenizer of this library's own (characters) has no Hugging Face form: only the weights are written.
        """
        tokenizer = self.tokenizer if hasattr(self.tokenizer, "save_pretrained") else None
        params = combine(state.params, state.frozen)
        save_hf(pathlib.Path(run_dir) / "export", self.model, params, tokenizer, overwrite=True)

    def describe(self) -> dict[str, Any]:
        """Parameter counts and the memory that parameters, gradients and optimizer state take; allocates nothing."""
        params, frozen = partition(self.model.abstract(), self.trainable)
        size = lambda tree: sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
        opt_state = jax.eval_shape(self.optimizer.init, params)
        gib = lambda n: f"{n / 2**30:.2f} GiB"  # noqa: E731
        facts = {
            "parameters": count_parameters(params) + count_parameters(frozen),
            "trainable parameters": count_parameters(params),
            "memory of parameters": gib(size(params) + size(frozen)),
            "memory of gradients": gib(size(params)),
            "memory of optimizer state": gib(size(opt_state)),
        }
        if self.sharding is not None:
            replicated = self.sharding.replicated(self.model.logical_axes(), self.model.abstract())
            facts["mesh"] = dict(self.sharding.mesh.shape)
            facts["parameters with a dimension the mesh does not divide"] = ", ".join(replicated) or "none"
        return facts


def setup(
    source: ModelSource, trainable: str, optimizer: OptimizerConfig, mesh: Mesh | None, tokenizer: Any = None
) -> Setup:
    """Open a model without reading its weights.

    Args:
      source: where it comes from.
      trainable: ``"all"``, ``"lora"`` or ``"last:<k>"``.
      optimizer: its configuration.
      mesh: axes data, fsdp, tensor; None or a single device means no sharding.
      tokenizer: used instead of the model's own.
    """
    sharding = None if mesh is None or mesh.size == 1 else Sharding(mesh)
    if source.tokenizer is not None and source.tokenizer.startswith(CHARACTERS):
        tokenizer = CharTokenizer(source.tokenizer.removeprefix(CHARACTERS))
        source = dataclasses.replace(source, tokenizer=None)
    model, tokenizer, load = open_model(source, sharding, tokenizer)
    if tokenizer is None:
        raise ConfigError(
            "the model has no tokenizer; set model.tokenizer to a directory, or to 'chars:' followed by an alphabet"
        )
    check_tokenizer(model.config, tokenizer)
    predicate = trainable_predicate(trainable, model)
    return Setup(model, tokenizer, load, predicate, make_optimizer(optimizer), sharding)
