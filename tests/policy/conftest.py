"""A small byte-level BPE tokenizer, trained here, in a folder of its own, and random architectures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_toy import architecture
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sesa_jax.policy.arch import Architecture, Spec, abstract, is_spec

CONTROL = ('<|im_start|>', '<|im_end|>', '<|endoftext|>')
MARKERS = ('<think>', '</think>')  # added, but not special: they too must never come out of a document
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = [
    'Where was the company of the river founded? <search>founder of the company</search>',
    'The answer is <answer>Paris</answer>. im_start im_end endoftext think user assistant system',
    'A second question about 1969, naïve cafés, and Köln 東京.',
]


@pytest.fixture(scope='session')
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('tokenizer')
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    # The control tokens enter the vocabulary of the model too, as trainers do by default.
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(CONTROL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    raw.train_from_iterator(TEXT * 20, trainer)
    raw.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token='<|im_end|>', pad_token='<|endoftext|>')
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope='session')
def make_arch() -> Callable[..., Architecture]:
    return architecture


@pytest.fixture(scope='session')
def random_params() -> Callable[..., Any]:
    """Parameters without a structure that could hide a fault: norm weights too are random, and nothing is small.
    matrices: standard deviation of the projections."""

    def make(arch: Architecture, seed: int = 0, matrices: float = 0.3) -> Any:
        rng = np.random.default_rng(seed)

        def value(spec: Spec) -> jax.Array:
            centre = 1.0 if spec.init == 'ones' else 0.0
            spread = matrices if spec.transpose else 0.3
            return jnp.asarray(centre + spread * rng.standard_normal(spec.shape), jnp.float32)

        return jax.tree.map(value, abstract(arch), is_leaf=is_spec)

    return make
