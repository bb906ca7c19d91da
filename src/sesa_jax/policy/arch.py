"""The shape of a causal language model, and the one abstract tree that everything else is derived from.

`Architecture` holds the numbers of a backbone; `abstract` lists every parameter once, with its shape, logical axes,
initialiser and Hugging Face name. Initialisation, shardings, the checkpoint target, import and export all walk that
tree, so a parameter cannot exist in one of them and be missing in another.

Left out: end and pad ids (they belong to the tokenizer), and every family but Qwen3. A family with biases or without
query and key norms is a further entry of `FAMILIES` and a condition in `_layer`.

Alphabet, here and in the whole project: B rows, T tokens, S cache slots, N query heads, K kv heads, G rollouts a
problem, H head size, D width, F hidden size, V vocabulary, L layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax

from sesa_jax.config import ConfigError

FAMILIES = {'Qwen3ForCausalLM': 'qwen3'}
"""Name in a config.json's `architectures` -> its `model_type`."""


class ModelError(ConfigError):
    """A model folder, or a mesh for it, that cannot be used. The message names the file and the tensor."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The numbers that fix a model's parameters and its arithmetic."""

    vocab: int  # V: rows of the embedding, at least the tokenizer's size
    layers: int  # L
    width: int  # D
    hidden: int  # F
    heads: int  # N
    kv_heads: int  # K
    head_size: int  # H; not always D / N
    rope_theta: float
    eps: float  # of every RMS norm
    tied: bool  # the output head is the embedding
    max_positions: int

    @property
    def group(self) -> int:
        """Query heads that share one kv head."""
        return self.heads // self.kv_heads

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str) -> Architecture:
        """Reads a config.json (both the older keys and those of transformers 5).

        `where` names the file in messages. Raises ModelError for a family, a rope or an option that the forward pass
        does not have, rather than loading weights that would then compute something else.
        """
        names = config.get('architectures') or []
        if len(names) != 1 or names[0] not in FAMILIES:
            found = ', '.join(map(str, names)) or 'none'
            raise ModelError(f'{where}: architecture {found} is not supported; supported: {", ".join(FAMILIES)}')

        def number(key: str, kind: type, default: Any = None) -> Any:
            value = config.get(key)
            value = default if value is None else value
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ModelError(f'{where}: {key} must be a number, found {value!r}')
            if not value > 0 or kind(value) != value:
                raise ModelError(f'{where}: {key} must be a positive {kind.__name__}, found {value!r}')
            return kind(value)

        for key, plain in (('attention_bias', False), ('use_sliding_window', False), ('hidden_act', 'silu')):
            if config.get(key, plain) != plain:
                raise ModelError(f'{where}: {key} = {config[key]!r} is not supported; only {plain!r} is')
        if config.get('quantization_config'):
            raise ModelError(f'{where}: quantised weights are not supported; use the unquantised folder')
        width, heads = number('hidden_size', int), number('num_attention_heads', int)
        kv_heads = number('num_key_value_heads', int, heads)
        if heads % kv_heads:
            raise ModelError(f'{where}: {heads} attention heads cannot share {kv_heads} key-value heads evenly')
        head_size = number('head_dim', int, width / heads)
        if head_size % 2:
            raise ModelError(f'{where}: head_dim {head_size} must be even for rotary positions')
        return cls(
            vocab=number('vocab_size', int),
            layers=number('num_hidden_layers', int),
            width=width,
            hidden=number('intermediate_size', int),
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            rope_theta=_rope_theta(config, where),
            eps=number('rms_norm_eps', float, 1e-6),
            tied=bool(config.get('tie_word_embeddings', False)),
            max_positions=number('max_position_embeddings', int, 32768),
        )

    def to_config(self) -> dict[str, Any]:
        """The config.json of this architecture, without token ids; the inverse of `from_config`."""
        return {
            'architectures': ['Qwen3ForCausalLM'],
            'model_type': 'qwen3',
            'vocab_size': self.vocab,
            'num_hidden_layers': self.layers,
            'hidden_size': self.width,
            'intermediate_size': self.hidden,
            'num_attention_heads': self.heads,
            'num_key_value_heads': self.kv_heads,
            'head_dim': self.head_size,
            # Both spellings, so that transformers 4 and 5 read the same value.
            'rope_theta': self.rope_theta,
            'rope_parameters': {'rope_type': 'default', 'rope_theta': self.rope_theta},
            'rms_norm_eps': self.eps,
            'tie_word_embeddings': self.tied,
            'max_position_embeddings': self.max_positions,
            'hidden_act': 'silu',
            'attention_bias': False,
            'attention_dropout': 0.0,
            'use_sliding_window': False,
        }


def _rope_theta(config: Mapping[str, Any], where: str) -> float:
    """The base of the rotary frequencies; refuses every kind of scaling by name."""
    tables = {key: config.get(key) or {} for key in ('rope_scaling', 'rope_parameters')}
    for key, table in tables.items():
        kind = table.get('rope_type', table.get('type', 'default'))
        if kind != 'default' or 'factor' in table:
            raise ModelError(f'{where}: {key} of type {kind!r} is not supported; only plain rotary positions are')
    theta = tables['rope_parameters'].get('rope_theta', config.get('rope_theta'))
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 1:
        raise ModelError(f'{where}: rope_theta must be a number above 1, found {theta!r}')
    return float(theta)


@dataclasses.dataclass(frozen=True)
class Spec:
    """One parameter before it exists."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]  # a logical name per dimension; `sharding.py` maps them to the mesh
    init: Literal['normal', 'ones']
    std: float  # of 'normal'
    hf: str  # Hugging Face tensor name; '{}' stands for the layer
    transpose: bool  # Hugging Face keeps [out, in], we keep [in, out]

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Shape of the Hugging Face tensor (of one layer)."""
        shape = self.shape[1:] if self.axes[0] == 'layers' else self.shape
        return shape[::-1] if self.transpose else shape


Path = tuple[str, ...]


def layer_specs(arch: Architecture) -> dict[str, Spec]:
    """The parameters of one layer, unstacked. Matrices are [in, out] and two-dimensional: heads are a reshape."""
    d, f, h = arch.width, arch.hidden, arch.head_size
    n, k = arch.heads * h, arch.kv_heads * h
    # Variance-preserving, and the two matrices that write to the residual stream shrink with depth.
    residual = 1 / math.sqrt(2 * arch.layers)

    def matrix(rows: int, columns: int, axes: tuple[str, str], name: str, scale: float = 1.0) -> Spec:
        return Spec((rows, columns), axes, 'normal', scale / math.sqrt(rows), f'model.layers.{{}}.{name}.weight', True)

    def norm(size: int, name: str) -> Spec:
        return Spec((size,), ('norm',), 'ones', 0.0, f'model.layers.{{}}.{name}.weight', False)

    return {
        'attention_norm': norm(d, 'input_layernorm'),
        'query': matrix(d, n, ('width', 'heads'), 'self_attn.q_proj'),
        'key': matrix(d, k, ('width', 'kv_heads'), 'self_attn.k_proj'),
        'value': matrix(d, k, ('width', 'kv_heads'), 'self_attn.v_proj'),
        'query_norm': norm(h, 'self_attn.q_norm'),
        'key_norm': norm(h, 'self_attn.k_norm'),
        'output': matrix(n, d, ('heads', 'width'), 'self_attn.o_proj', residual),
        'mlp_norm': norm(d, 'post_attention_layernorm'),
        'gate': matrix(d, f, ('width', 'hidden'), 'mlp.gate_proj'),
        'up': matrix(d, f, ('width', 'hidden'), 'mlp.up_proj'),
        'down': matrix(f, d, ('hidden', 'width'), 'mlp.down_proj', residual),
    }


def abstract(arch: Architecture) -> dict[str, Any]:
    """The tree of Specs: {'embed', 'layers': {name: stacked [L, ...]}, 'final_norm', 'head' if untied}."""
    v, d = arch.vocab, arch.width
    stacked = {
        name: dataclasses.replace(spec, shape=(arch.layers, *spec.shape), axes=('layers', *spec.axes))
        for name, spec in layer_specs(arch).items()
    }
    tree: dict[str, Any] = {
        'embed': Spec((v, d), ('vocab', 'width'), 'normal', 0.02, 'model.embed_tokens.weight', False),
        'layers': stacked,
        'final_norm': Spec((d,), ('norm',), 'ones', 0.0, 'model.norm.weight', False),
    }
    if not arch.tied:
        tree['head'] = Spec((d, v), ('width', 'vocab'), 'normal', 1 / math.sqrt(d), 'lm_head.weight', True)
    return tree


def is_spec(value: Any) -> bool:
    return isinstance(value, Spec)


def leaves(tree: dict[str, Any]) -> Iterator[tuple[Path, Spec]]:
    """Every Spec of an abstract tree with its path, such as (('layers', 'query'), Spec)."""
    for keys, spec in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_spec):
        yield tuple(key.key for key in keys), spec


def shapes(arch: Architecture, dtype: Any) -> dict[str, Any]:
    """The tree as jax.ShapeDtypeStruct: the target of a checkpoint restore."""
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), abstract(arch), is_leaf=is_spec)


def hf_names(arch: Architecture) -> dict[str, tuple[Path, int | None, bool]]:
    """Hugging Face tensor name -> (path in the tree, layer or None, whether the tensor is transposed)."""
    names: dict[str, tuple[Path, int | None, bool]] = {}
    for path, spec in leaves(abstract(arch)):
        if spec.axes[0] == 'layers':
            names |= {spec.hf.format(i): (path, i, spec.transpose) for i in range(arch.layers)}
        else:
            names[spec.hf] = (path, None, spec.transpose)
    return names


def parameter_count(arch: Architecture) -> int:
    """Number of parameters, the tied head counted once."""
    return sum(math.prod(spec.shape) for _, spec in leaves(abstract(arch)))
