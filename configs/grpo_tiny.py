"""A character transformer learns two-digit sums: cross-entropy until it is right a quarter of the time, then GRPO.

    python -m jaxrl.launch --config=configs/grpo_tiny.py --run_dir=runs/tiny

The prompt is "07+45=", the answer "250" (lowest digit first). Variants: "" and "debug" (a few tiny steps on one-digit sums).
"""

from ml_collections import ConfigDict


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", "debug"):
        raise ValueError(f"variant {variant!r} is unknown; use '' or 'debug'")
    config = ConfigDict(
        dict(
            system="grpo",
            model=dict(
                architecture=dict(
                    vocab_size=14,  # twelve characters, padding, EOS
                    d_model=64,
                    num_layers=2,
                    num_heads=4,
                    num_kv_heads=4,
                    head_dim=16,
                    d_ff=256,
                    max_position=16,
                    tie_embeddings=False,
                    scan_layers=False,
                ),
                tokenizer="chars:0123456789+=",
            ),
            data=dict(kind="column_sums", heldout=1024),
            prompt=dict(max_prompt_len=6),
            rewards=(dict(name="exact_match"),),
            rollout=dict(prompts=16, group_size=8, max_tokens=3, slots=128),
            warm_start=dict(until_accuracy=0.25, check_every=5),
            algorithm=dict(name="grpo"),
            optimizer=dict(name="adam", learning_rate=3e-4, clip_norm=1.0),
            eval=dict(prompts=1024, samples=1, k=(1,), greedy=True),
            run=dict(total_steps=100, eval_every=25, checkpoint_every=50),
        )
    )
    if variant == "debug":
        # One-digit sums, because the warm start must get some of few held-out prompts right within few steps.
        config.data.update(params=dict(num_digits=1), heldout=32)
        config.rollout.update(prompts=4, group_size=2, max_tokens=2, slots=8)
        config.eval.update(prompts=32)
        config.warm_start.update(until_accuracy=0.02, check_every=10)
        config.run.update(total_steps=3, eval_every=3, checkpoint_every=2)
    return config
