"""The shape of a causal language model, and the one abstract tree that everything else is derived from.

`Architecture` holds the numbers of a backbone; `abstract` lists every parameter once, with its shape, logical axes,
initialiser and Hugging Face name. Initialisation, shardings, the checkpoint target, import and export all walk that
tree, so a parameter cannot exist in one of them and be missing in another.

The three families (Qwen3, Qwen2.5, Llama 3.1) differ in two switches, biases on query, key and value and norms of query
and key, and in how their config.json is written. Left out: end and pad ids (they belong to the tokenizer), and whatever
else a config.json may ask for; it is refused by name.

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


@dataclasses.dataclass(frozen=True)
class Family:
    """What the name of a family fixes."""

    name: str  # in a config.json's `architectures`
    qkv_bias: bool
    qk_norm: bool
    plain: Mapping[str, Any]
    """Switches of its config.json with the only value that the forward pass has; also what transformers assumes."""


_NO_WINDOW = {'use_sliding_window': False}
FAMILIES = {
    'qwen3': Family('Qwen3ForCausalLM', False, True, {'attention_bias': False, **_NO_WINDOW}),
    'qwen2': Family('Qwen2ForCausalLM', True, False, _NO_WINDOW),  # biases without being asked, and none on o_proj
    'llama': Family('LlamaForCausalLM', False, False, {'attention_bias': False, 'mlp_bias': False}),
}
"""`model_type` of a config.json -> the family."""


class ModelError(ConfigError):
    """A model folder, or a mesh for it, that cannot be used. The message names the file and the tensor."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretched rotary positions: slow waves turn `factor` times slower, fast ones as before."""

    factor: float
    low_freq_factor: float  # waves that turn less often than this in the original context are stretched
    high_freq_factor: float  # waves that turn more often are kept; in between, a mixture
    original_max_positions: int


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
    family: Literal['qwen3', 'qwen2', 'llama'] = 'qwen3'
    qkv_bias: bool = False  # on query, key and value; never on the output
    qk_norm: bool = True  # an RMS norm over H of each query and key, before the rotation
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        family = FAMILIES[self.family]
        if (self.qkv_bias, self.qk_norm) != (family.qkv_bias, family.qk_norm):
            raise ModelError(
                f'family {self.family} has qkv_bias {family.qkv_bias} and qk_norm {family.qk_norm}, '
                f'found {self.qkv_bias} and {self.qk_norm}'
            )

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
        model_type = _family(config, where)
        family = FAMILIES[model_type]

        def number(key: str, kind: type, default: Any = None) -> Any:
            value = config.get(key)
            return _number(default if value is None else value, kind, key, where)

        for key, plain in {'hidden_act': 'silu', 'partial_rotary_factor': 1.0, **family.plain}.items():
            if config.get(key, plain) != plain:
                raise ModelError(f'{where}: {key} = {config[key]!r} is not supported; only {plain!r} is')
        for kind in config.get('layer_types') or []:
            if kind != 'full_attention':
                raise ModelError(f'{where}: layer_types with {kind!r} are not supported; only full_attention is')
        if config.get('quantization_config'):
            raise ModelError(f'{where}: quantised weights are not supported; use the unquantised folder')
        width, heads = number('hidden_size', int), number('num_attention_heads', int)
        kv_heads = number('num_key_value_heads', int, heads)
        if heads % kv_heads:
            raise ModelError(f'{where}: {heads} attention heads cannot share {kv_heads} key-value heads evenly')
        head_size = number('head_dim', int, width / heads)
        if head_size % 2:
            raise ModelError(f'{where}: head_dim {head_size} must be even for rotary positions')
        theta, scaling = _rope(config, where)
        return cls(
            vocab=number('vocab_size', int),
            layers=number('num_hidden_layers', int),
            width=width,
            hidden=number('intermediate_size', int),
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            rope_theta=theta,
            eps=number('rms_norm_eps', float, 1e-6),
            tied=bool(config.get('tie_word_embeddings', False)),
            max_positions=number('max_position_embeddings', int),
            family=model_type,
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            rope_scaling=scaling,
        )

    def to_config(self) -> dict[str, Any]:
        """The config.json of this architecture, without token ids; the inverse of `from_config`."""
        family = FAMILIES[self.family]
        # The rope in both spellings, so that transformers 4 and 5 read the same values.
        table = {'rope_type': 'default', 'rope_theta': self.rope_theta}
        config = {
            'architectures': [family.name],
            'model_type': self.family,
            'vocab_size': self.vocab,
            'num_hidden_layers': self.layers,
            'hidden_size': self.width,
            'intermediate_size': self.hidden,
            'num_attention_heads': self.heads,
            'num_key_value_heads': self.kv_heads,
            'head_dim': self.head_size,
            'rope_theta': self.rope_theta,
            'rope_parameters': table,
            'rms_norm_eps': self.eps,
            'tie_word_embeddings': self.tied,
            'max_position_embeddings': self.max_positions,
            'hidden_act': 'silu',
            'attention_dropout': 0.0,
            **family.plain,
        }
        if self.rope_scaling is not None:
            stretch = {key: getattr(self.rope_scaling, field) for field, key in SCALING_KEYS.items()}
            config['rope_scaling'] = {'rope_type': 'llama3', **stretch}
            table |= config['rope_scaling']
        return config


SCALING_KEYS = {
    'factor': 'factor',
    'low_freq_factor': 'low_freq_factor',
    'high_freq_factor': 'high_freq_factor',
    'original_max_positions': 'original_max_position_embeddings',
}
"""Field of RopeScaling -> its key in a config.json."""


def _family(config: Mapping[str, Any], where: str) -> str:
    names = config.get('architectures') or []
    by_name = {family.name: model_type for model_type, family in FAMILIES.items()}
    if not isinstance(names, list):
        raise ModelError(f'{where}: architectures must be a list of one name, found {names!r}')
    if len(names) != 1 or str(names[0]) not in by_name:
        found = ', '.join(map(str, names)) or 'none'
        raise ModelError(f'{where}: architecture {found} is not supported; supported: {", ".join(by_name)}')
    model_type = by_name[names[0]]
    if config.get('model_type', model_type) != model_type:  # transformers goes by the type, so both must say the same
        raise ModelError(
            f'{where}: architecture {names[0]} is of model_type {model_type!r}, found {config["model_type"]!r}'
        )
    return model_type


def _number(value: Any, kind: type, name: str, where: str) -> Any:
    """A positive number of a config.json as `kind`; a whole one where kind is int."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f'{where}: {name} must be a number, found {value!r}')
    if not 0 < value < math.inf or kind(value) != value:
        raise ModelError(f'{where}: {name} must be a positive {kind.__name__}, found {value!r}')
    return kind(value)


def _rope(config: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """The base of the rotary frequencies and their scaling; every kind of scaling but llama3 is refused by name.

    transformers 4 writes `rope_theta` and `rope_scaling`, 5 writes `rope_parameters`; a file may have both, which must
    agree then.
    """
    tables = {key: config.get(key) or {} for key in ('rope_scaling', 'rope_parameters')}
    scalings = {}
    for key, table in tables.items():
        if not isinstance(table, Mapping):
            raise ModelError(f'{where}: {key} must be an object, found {table!r}')
        kind = table.get('rope_type', table.get('type', 'default'))
        name = f'{where}: {key} of type {kind!r}'
        if kind not in ('default', 'llama3') or (kind == 'default' and 'factor' in table):
            raise ModelError(f'{name} is not supported; only plain rotary positions and llama3 are')
        if table.get('partial_rotary_factor', 1.0) != 1.0:
            raise ModelError(f'{name}: partial_rotary_factor must be 1.0, found {table["partial_rotary_factor"]!r}')
        if kind == 'llama3':
            kinds = {field.name: int if field.type == 'int' else float for field in dataclasses.fields(RopeScaling)}
            scaling = RopeScaling(
                **{f: _number(table.get(SCALING_KEYS[f]), kinds[f], f'{key}.{SCALING_KEYS[f]}', where) for f in kinds}
            )
            if scaling.factor < 1 or scaling.high_freq_factor <= scaling.low_freq_factor:
                raise ModelError(f'{name} needs a factor of at least 1 and high_freq_factor > low_freq_factor')
            scalings[key] = scaling
        elif table:
            scalings[key] = None
    thetas = {f'{key}.rope_theta': table['rope_theta'] for key, table in tables.items() if 'rope_theta' in table}
    if config.get('rope_theta') is not None:
        thetas['rope_theta'] = config['rope_theta']
    for found, values in (('rope_theta', thetas), ('rope scaling', scalings)):
        if len(set(values.values())) > 1:
            said = ', '.join(f'{key} = {value!r}' for key, value in values.items())
            raise ModelError(f'{where}: two values of {found}, {said}; make them agree')
    theta = next(iter(thetas.values()), None)
    if _number(theta, float, 'rope_theta', where) <= 1:
        raise ModelError(f'{where}: rope_theta must be a number above 1, found {theta!r}')
    return float(theta), next(iter(scalings.values()), None)


@dataclasses.dataclass(frozen=True)
class Spec:
    """One parameter before it exists."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]  # a logical name per dimension; `sharding.py` maps them to the mesh
    init: Literal['normal', 'ones', 'zeros']
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

    def bias(size: int, axis: str, name: str) -> Spec:
        return Spec((size,), (axis,), 'zeros', 0.0, f'model.layers.{{}}.{name}.bias', False)

    specs = {
        'attention_norm': norm(d, 'input_layernorm'),
        'query': matrix(d, n, ('width', 'heads'), 'self_attn.q_proj'),
        'key': matrix(d, k, ('width', 'kv_heads'), 'self_attn.k_proj'),
        'value': matrix(d, k, ('width', 'kv_heads'), 'self_attn.v_proj'),
        'output': matrix(n, d, ('heads', 'width'), 'self_attn.o_proj', residual),
        'mlp_norm': norm(d, 'post_attention_layernorm'),
        'gate': matrix(d, f, ('width', 'hidden'), 'mlp.gate_proj'),
        'up': matrix(d, f, ('width', 'hidden'), 'mlp.up_proj'),
        'down': matrix(f, d, ('hidden', 'width'), 'mlp.down_proj', residual),
    }
    if arch.qkv_bias:
        specs['query_bias'] = bias(n, 'heads', 'self_attn.q_proj')
        specs['key_bias'] = bias(k, 'kv_heads', 'self_attn.k_proj')
        specs['value_bias'] = bias(k, 'kv_heads', 'self_attn.v_proj')
    if arch.qk_norm:
        specs['query_norm'] = norm(h, 'self_attn.q_norm')
        specs['key_norm'] = norm(h, 'self_attn.k_norm')
    return specs


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
