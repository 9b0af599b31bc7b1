"""Golden outputs of transformers on torch; a program that the parity tests run.

``make OUT``: for every family write a random tiny model to OUT/NAME and its outputs to OUT/NAME.npz.
``read DIR TOKENS OUT``: write the logits of the exported model DIR for TOKENS (.npy) to OUT (.npy).
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import torch
import transformers

SHAPE = dict(
    vocab_size=61, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=40, max_position_embeddings=64, use_cache=False, attn_implementation="eager",
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", rope_theta=5e4, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
LINEAR = dict(rope_type="linear", rope_theta=1e4, factor=2.0)
PLAIN = dict(rope_type="default", rope_theta=1e5)

#: name -> (family, tied head, rotary settings, further settings)
CASES = {
    "llama": ("Llama", True, PLAIN, {"rms_norm_eps": 1e-5}),
    "llama_llama3_untied": ("Llama", False, LLAMA3, {}),
    "llama_linear": ("Llama", True, LINEAR, {"head_dim": 10}),
    "qwen2": ("Qwen2", True, PLAIN, {}),
    "qwen2_yarn_untied": ("Qwen2", False, YARN, {}),
    "qwen3": ("Qwen3", True, PLAIN, {"head_dim": 8}),
    "qwen3_yarn_untied": (
        "Qwen3",
        False,
        {**YARN, "attention_factor": 1.3, "beta_fast": 16.0},
        {"head_dim": 16},
    ),
}


def make(out: pathlib.Path) -> None:
    for seed, (name, (family, tied, rope, more)) in enumerate(CASES.items()):
        config_class = getattr(transformers, f"{family}Config")
        config = config_class(**SHAPE, tie_word_embeddings=tied, rope_parameters=dict(rope), **more)
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # biases and norms too: zeros and ones would hide mistakes
                parameter.add_(0.15 * torch.randn_like(parameter))
        tokens = torch.randint(0, SHAPE["vocab_size"], (2, 48))
        with torch.no_grad():
            result = model(tokens, output_hidden_states=True)
        model.save_pretrained(out / name)
        hidden = {f"hidden_{i}": h.numpy() for i, h in enumerate(result.hidden_states)}
        np.savez(out / f"{name}.npz", tokens=tokens.numpy(), logits=result.logits.numpy(), **hidden)


def read(directory: str, tokens: str, out: str) -> None:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    wrong = {kind: list(names) for kind, names in info.items() if names}
    if wrong:
        raise SystemExit(f"weights did not fit: {wrong}")
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(np.load(tokens))).logits
    np.save(out, logits.numpy())


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(pathlib.Path(sys.argv[2]))
    else:
        for arguments in zip(sys.argv[2::3], sys.argv[3::3], sys.argv[4::3], strict=True):
            read(*arguments)
