"""A GGUF file as a Hugging Face folder: config, tokenizer, chat template and float32 safetensors, made once.

Everything else only knows Hugging Face folders. The quantised blocks are expanded by the `gguf` package to the float32
values that they stand for, so nothing is rounded again. llama.cpp stores the query and key rows of a head interleaved
(first half, second half, alternating); they are put back as transformers orders them.

Left out: every GGUF but SmolLM2's kind (architecture `llama` with plain rotary positions and the `smollm` byte-level
BPE); what differs is refused by name. The weights pass through memory as a whole: 0.5 GB for SmolLM2-135M.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sesa_jax.config import ConfigError
from sesa_jax.policy.arch import ModelError
from sesa_jax.run.files import TEMPORARY, sync, sync_tree

CONTROL, USER_DEFINED = 3, 4  # kinds in tokenizer.ggml.token_type that are whole in any text
OUTSIDE = {  # GGUF name -> Hugging Face name
    'token_embd.weight': 'model.embed_tokens.weight',
    'output_norm.weight': 'model.norm.weight',
    'output.weight': 'lm_head.weight',
}
IN_A_BLOCK = {
    'attn_norm': 'input_layernorm',
    'attn_q': 'self_attn.q_proj',
    'attn_k': 'self_attn.k_proj',
    'attn_v': 'self_attn.v_proj',
    'attn_output': 'self_attn.o_proj',
    'ffn_norm': 'post_attention_layernorm',
    'ffn_gate': 'mlp.gate_proj',
    'ffn_up': 'mlp.up_proj',
    'ffn_down': 'mlp.down_proj',
}


def convert(gguf_file: Path, folder: Path) -> None:
    """Make `folder` from `gguf_file`, unless it is there already.

    The folder gets its name when it is complete and durable, so half of one is never taken for the whole. Processes
    that convert at once wait for each other; what one of them left when it was killed, the next one removes.
    Raises ModelError for a file that is damaged or of another kind, ConfigError without the package `gguf`.
    """
    folder = Path(folder)
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    half = folder.with_name(folder.name + TEMPORARY)
    with open(folder.with_name(folder.name + '.lock'), 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():  # another process was faster
            return
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir()
        try:
            _write(gguf_file, half)
            sync_tree(half)
            os.rename(half, folder)
            sync(folder.parent)
        finally:
            shutil.rmtree(half, ignore_errors=True)


def _write(gguf_file: Path, folder: Path) -> None:
    reader, dequantise = _open(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}

    def field(name: str) -> Any:
        if name not in fields:
            raise ModelError(f'{gguf_file}: the field {name} is missing')
        return fields[name]

    for name, supported in (
        ('general.architecture', 'llama'),
        ('tokenizer.ggml.model', 'gpt2'),
        ('tokenizer.ggml.pre', 'smollm'),
    ):
        if field(name) != supported:
            raise ModelError(f'{gguf_file}: {name} = {field(name)!r} is not supported; only {supported!r} is')
    if scaled := sorted(name for name in fields if name.startswith('llama.rope.scaling')):
        raise ModelError(f'{gguf_file}: {scaled[0]} is not supported; only plain rotary positions are')
    config = _config(field, tied=all(tensor.name != 'output.weight' for tensor in reader.tensors))
    weights = _weights(gguf_file, reader.tensors, dequantise, config)
    save_file(weights, folder / 'model.safetensors', metadata={'format': 'pt'})
    _tokenizer(field).save(str(folder / 'tokenizer.json'))
    tokens = field('tokenizer.ggml.tokens')
    special = {'bos': 'bos', 'eos': 'eos', 'unk': 'unknown', 'pad': 'padding'}
    written: dict[str, Mapping[str, Any]] = {
        'config.json': config,
        'generation_config.json': {key: config[key] for key in ('bos_token_id', 'eos_token_id', 'pad_token_id')},
        'tokenizer_config.json': {
            'tokenizer_class': 'PreTrainedTokenizerFast',
            **{f'{ours}_token': tokens[field(f'tokenizer.ggml.{theirs}_token_id')] for ours, theirs in special.items()},
            'chat_template': field('tokenizer.chat_template'),
            'clean_up_tokenization_spaces': False,
            'model_max_length': config['max_position_embeddings'],
        },
    }
    for name, data in written.items():
        (folder / name).write_text(json.dumps(data, indent=2, ensure_ascii=False) + '\n', encoding='utf-8')


def _open(gguf_file: Path) -> tuple[Any, Callable[..., np.ndarray]]:
    try:
        import gguf
    except ImportError:
        raise ConfigError(f"reading {gguf_file} needs the package gguf: pip install 'sesa-jax[gguf]'") from None
    try:
        return gguf.GGUFReader(gguf_file), gguf.dequantize
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ModelError(f'{gguf_file} cannot be read as GGUF: {error}') from None


def _config(field: Callable[[str], Any], tied: bool) -> dict[str, Any]:
    """config.json of the Llama family. Single-precision numbers of the file become the decimals they stand for."""
    width, heads = field('llama.embedding_length'), field('llama.attention.head_count')
    theta, eps = (
        float(str(np.float32(field(name))))
        for name in ('llama.rope.freq_base', 'llama.attention.layer_norm_rms_epsilon')
    )
    return {
        'architectures': ['LlamaForCausalLM'],
        'model_type': 'llama',
        'vocab_size': len(field('tokenizer.ggml.tokens')),
        'num_hidden_layers': field('llama.block_count'),
        'hidden_size': width,
        'intermediate_size': field('llama.feed_forward_length'),
        'num_attention_heads': heads,
        'num_key_value_heads': field('llama.attention.head_count_kv'),
        'head_dim': width // heads,
        'rope_theta': theta,
        'rope_parameters': {'rope_type': 'default', 'rope_theta': theta},
        'rms_norm_eps': eps,
        'tie_word_embeddings': tied,
        'max_position_embeddings': field('llama.context_length'),
        'hidden_act': 'silu',
        'attention_bias': False,
        'mlp_bias': False,
        'bos_token_id': field('tokenizer.ggml.bos_token_id'),
        'eos_token_id': field('tokenizer.ggml.eos_token_id'),
        'pad_token_id': field('tokenizer.ggml.padding_token_id'),
        'dtype': 'float32',
    }


def _weights(
    gguf_file: Path, tensors: list[Any], dequantise: Callable[..., np.ndarray], config: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Hugging Face name -> float32 array."""
    heads = {'attn_q': config['num_attention_heads'], 'attn_k': config['num_key_value_heads']}
    weights: dict[str, np.ndarray] = {}
    for tensor in tensors:
        kind = None
        name = OUTSIDE.get(tensor.name)
        match tensor.name.split('.'):
            case ['blk', layer, kind, 'weight'] if kind in IN_A_BLOCK:
                name = f'model.layers.{layer}.{IN_A_BLOCK[kind]}.weight'
        if name is None:
            raise ModelError(f'{gguf_file}: tensor {tensor.name} does not belong to this architecture')
        weight = np.asarray(dequantise(tensor.data, tensor.tensor_type), np.float32)
        if kind in heads:
            weight = uninterleave(weight, heads[kind])
        weights[name] = np.ascontiguousarray(weight)
    return weights


def uninterleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key matrix, f32[heads * H, D], from llama.cpp's order to that of transformers."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _tokenizer(field: Callable[[str], Any]) -> Tokenizer:
    """Byte-level BPE with every digit on its own: what llama.cpp calls `smollm`. (The converter of transformers 5.24
    does not know that name and leaves digits together.)"""
    tokens, kinds = field('tokenizer.ggml.tokens'), field('tokenizer.ggml.token_type')
    merges = [tuple(merge.split(' ')) for merge in field('tokenizer.ggml.merges')]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    added = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, USER_DEFINED)]
    made.add_tokens([AddedToken(token, normalized=False, special=kind == CONTROL) for token, kind in added])
    return made
