"""Which advantage rule and which loss: a named algorithm or another library's preset, with single options replaced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl import ops
from jaxrl.errors import ConfigError
from jaxrl.ops.advantages import ADVANTAGE_RULES
from jaxrl.ops.presets import LossPreset
from jaxrl.rollout.types import SamplingParams
from jaxrl.runtime.config import field, suggest

LIBRARIES: dict[str, Callable[..., LossPreset]] = {"trl": ops.trl, "verl": ops.verl, "tunix": ops.tunix}


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    """A starting point, and what differs from it. None keeps the value of the starting point."""

    name: str = field("grpo", "an algorithm of ops.ALGORITHMS, or trl, verl, tunix for that library's conventions")
    options: Mapping[str, Any] = field({}, "options of trl, verl or tunix, by that library's names")
    advantage_rule: str | None = field(None, "a key of ops.ADVANTAGE_RULES")
    scale_rewards: str | None = field(None, "divide advantages by the deviation of the group, the batch, or none")
    allow_singleton: bool | None = field(None, "accept groups of one completion")
    clip_low: float | None = field(None, "lower clip range: ratio >= 1 - clip_low")
    clip_high: float | None = field(None, "upper clip range: ratio <= 1 + clip_high")
    dual_clip: float | None = field(None, "dual-clip constant c > 1 for negative advantages")
    aggregation: str | None = field(None, "normaliser of the loss, a mode of ops.Aggregation")
    kl_coef: float | None = field(None, "weight of the KL to the initial policy")
    kl_estimator: str | None = field(None, "a name of ops.KL_ESTIMATORS")
    kl_target: float | None = field(
        None, "adapt kl_coef towards this KL, the mean over all trained tokens (needs kl_coef as the start)"
    )
    kl_horizon: float = field(10000.0, "rows over which the adaptive kl_coef may change by 20 %")
    entropy_coef: float | None = field(None, "weight of the entropy bonus")
    ratio_against: str | None = field(None, "old (trainer's log-probabilities) or sampler (bypass)")
    mismatch_level: str | None = field(None, "sampler mismatch weights: none, token or sequence")
    mismatch_mode: str = field("truncate", "truncate the weights at the bounds, or mask what is outside")
    mismatch_upper: float = field(2.0, "upper bound of a mismatch weight")
    mismatch_lower: float | None = field(None, "lower bound of a mismatch weight")

    def validate(self) -> None:
        self.resolve()

    def resolve(self) -> LossPreset:
        """The advantage rule and loss.

        Raises:
          ConfigError: unknown names, or options that exclude each other.
        """
        if self.name in LIBRARIES:
            try:
                preset = LIBRARIES[self.name](**self.options)
            except TypeError as error:
                raise ConfigError(f"algorithm.options do not fit {self.name}: {error}") from error
        elif self.options:
            raise ConfigError(f"algorithm.options are for {', '.join(LIBRARIES)}; {self.name!r} takes none")
        elif self.name in ops.ALGORITHMS:
            preset = ops.algorithm(self.name)
        else:
            raise ConfigError(f"algorithm.name is {self.name!r}; {suggest(self.name, [*ops.ALGORITHMS, *LIBRARIES])}")
        if self.advantage_rule is not None and self.advantage_rule not in ADVANTAGE_RULES:
            raise ConfigError(
                f"algorithm.advantage_rule is {self.advantage_rule!r}; {suggest(self.advantage_rule, ADVANTAGE_RULES)}"
            )
        advantage = _replace(
            preset.advantage, rule=self.advantage_rule, scale=self.scale_rewards, allow_singleton=self.allow_singleton
        )
        loss = preset.loss
        policy = _replace(loss.policy, clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip)
        aggregation = _replace(loss.aggregation, mode=self.aggregation)
        mismatch = loss.mismatch
        if self.mismatch_level is not None:
            if preset.correction is not None and preset.correction.level != "none":
                raise ConfigError(
                    "algorithm.mismatch_level and the rollout_is of algorithm.options would weight every token twice; "
                    "drop one of them"
                )
            mismatch = ops.MismatchConfig(
                level=self.mismatch_level, mode=self.mismatch_mode, upper=self.mismatch_upper, lower=self.mismatch_lower
            )
        loss = dataclasses.replace(loss, policy=policy, aggregation=aggregation, mismatch=mismatch)
        loss = _replace(
            loss,
            kl_coef=self.kl_coef,
            kl_estimator=self.kl_estimator,
            entropy_coef=self.entropy_coef,
            ratio_against=self.ratio_against,
        )
        if self.kl_target is not None:
            if not loss.kl_coef > 0:
                raise ConfigError("algorithm.kl_target adapts algorithm.kl_coef, which is 0; give it a start above 0")
            for name in ("kl_target", "kl_horizon"):
                if not getattr(self, name) > 0:
                    raise ConfigError(f"algorithm.{name} is {getattr(self, name)}; give a value above 0")
        return dataclasses.replace(preset, advantage=advantage, loss=loss)

    @staticmethod
    def check_sampling(sampling: SamplingParams, preset: LossPreset) -> None:
        """Refuse truncated sampling without a correction.

        The sampler's log-probabilities are then of another distribution than the trainer's: every ratio would be off
        by the mass that was cut.
        """
        truncated = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        corrected = preset.correction is not None or (preset.loss.mismatch or ops.MismatchConfig(level="none")).level != "none"
        if truncated and not corrected:
            raise ConfigError(
                f"rollout.top_k={sampling.top_k}, top_p={sampling.top_p}, min_p={sampling.min_p} cut the distribution that "
                "is sampled from, and the loss corrects nothing; set algorithm.mismatch_level=token, or sample without cuts"
            )
        if truncated and preset.loss.ratio_against == "sampler":
            raise ConfigError(
                "algorithm.ratio_against=sampler with top_k, top_p or min_p would put the cut mass into every ratio; "
                "use ratio_against=old"
            )


def _replace(record: Any, **changes: Any) -> Any:
    """``dataclasses.replace`` of the options that are set."""
    return dataclasses.replace(record, **{name: value for name, value in changes.items() if value is not None})
