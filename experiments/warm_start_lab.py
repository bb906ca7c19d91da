"""How `tiny` is made: from nothing, on a stream of fresh lab worlds. The recipe behind `experiments/warm_start.py DIR`.

A Qwen3-family decoder of about 0.9 M parameters learns the protocol of the lab from scripted players
(`worlds/demonstrations.py`): naive search, following the query template of a card whose trigger fits, following a pointer
now and then, and asking questions backwards from a target. It never sees the words that runs play with. The recipe counts
steps, not seconds, and depends on nothing but the seed.

What mattered, in the order of its size: the think line that repeats relation and template before the search; relation
names and key words that change with every world, so that following is learned in context; double loss weight on think
tokens; the curriculum of one, two, then three hops.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import tokenizers
import tyro
from tokenizers import decoders, models, pre_tokenizers, trainers

from sesa_jax import config
from sesa_jax.policy import arch as architecture
from sesa_jax.policy import hf, transformer
from sesa_jax.policy.tokenizer import Tokenizer
from sesa_jax.skills import priming
from sesa_jax.worlds import demonstrations, lab

VOCABULARY = 1024
CONTROL = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    '{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)
TINY = architecture.Architecture(
    vocab=VOCABULARY, layers=4, width=128, hidden=384, heads=4, kv_heads=2, head_size=32,
    rope_theta=1e4, eps=1e-6, tied=True, max_positions=2048,
)  # fmt: skip
BUCKETS = (192, 320, 448, 640)
FIRST_WORLD = 10_000  # far from the seeds of runs
OBSERVATION = config.lab_preset(config.Run()).lengths.observation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(demonstrations.Mix):
    """How `tiny` is made."""

    out: tyro.conf.Positional[pathlib.Path]
    """Folder to write; a Hugging Face model folder."""
    model: Literal['tiny'] = 'tiny'
    world: Literal['lab'] = 'lab'
    resume: bool = False
    """Go on from the newest checkpoint of that folder."""
    start: pathlib.Path | None = None
    """Begin with this folder's weights and tokenizer, with all numbers of hops from the first step."""
    steps: int = 9000
    tokens: int = 2048
    """Padded tokens a step."""
    learning_rate: float = 2e-2
    warmup: int = 100
    weight_decay: float = 0.05
    think_weight: float = 3.0
    context_weight: float = 0.2
    """Loss weight of prompts and observations at the start, falling to 0 at the end: names that come again there teach
    copying early."""
    demonstrations_per_world: int = 48
    soften: float = 1.0
    """Temperature that is folded into the last norm of what is written: a policy that imitates a script is so certain that
    the rollouts of a group hardly differ, and then there is nothing to learn from."""
    stop: int | None = None
    """Stop here on a schedule of `steps`."""
    checkpoint_every: int = 500
    say_every: int = 100
    seed: int = 0


def prepare(recipe: Recipe) -> tuple[Any, Callable[..., Iterator[Any]], Callable[..., Any], Callable[[Any], None]]:
    """(state, batches from behind a step on, update, export) for the loop of `warm_start.py`."""
    if recipe.start is None:
        train_tokenizer(recipe.out)
        (recipe.out / 'config.json').write_text(json.dumps(model_config(recipe.out), indent=1))
        tokenizer = Tokenizer(recipe.out)
        params = transformer.init(TINY, jax.random.key(recipe.seed))
    else:
        tokenizer = Tokenizer(recipe.start)
        params = hf.load_params(recipe.start, TINY)
    settings = model_config(recipe.start or recipe.out)
    optimizer, step = make_update(recipe)

    def update(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        ids, lengths, weights = batch
        params, moments, loss, right = step(
            state['params'], state['moments'], jnp.asarray(ids), jnp.asarray(lengths), weights
        )
        return {'params': params, 'moments': moments}, {'loss': loss, 'right': right}

    def export(state: Any) -> None:
        params = {**state['params'], 'final_norm': state['params']['final_norm'] / recipe.soften}
        hf.save(recipe.out, TINY, params, settings, recipe.start or recipe.out)

    # The stream is one generator; what a resumed run has seen is made again and thrown away.
    stream = lambda done: itertools.islice(batches(tokenizer, recipe), done, None)  # noqa: E731
    return {'params': params, 'moments': optimizer.init(params)}, stream, update, export


# --- tokenizer -------------------------------------------------------------------------------------------------------


def train_tokenizer(folder: pathlib.Path) -> None:
    """A byte-level BPE whose pieces of made-up words are syllables, written as a Hugging Face tokenizer.

    Made-up words of the training text are cut between their syllables before pairs are counted, so no merge joins two
    syllables, and a word of the play half is cut just as one of the warm half.
    """
    made_up = set(lab.words('warm'))

    def pieces(text: str) -> Iterator[str]:
        for piece in filter(None, re.split(r'( ?[A-Za-z]+)', text)):
            if piece.strip().lower() in made_up:
                first, *rest = lab.syllables(piece.strip())
                yield from (piece[: piece.index(first)] + first, *rest)
            else:
                yield piece

    def text() -> Iterator[str]:
        rng = np.random.default_rng(0)
        for seed in range(3):
            for transcript in demonstrations.play(seed, rng, demonstrations.Mix(), hops=3, count=200):
                for segment in transcript.text():
                    yield from pieces(segment)
        for card in priming.handwritten():
            for _ in range(20):
                yield from pieces(f'- {card.shown()}\n')
        for _ in range(600):
            yield from (form for s in lab.STARTS for form in (f' {s}', f' {s.capitalize()}', s.capitalize()))
            yield from lab.ENDS

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY - len(CONTROL), initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(text(), trainer)
    bpe.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in CONTROL])
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / 'tokenizer.json'))
    settings = {
        'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': '<|im_end|>', 'pad_token': '<|endoftext|>',
        'chat_template': CHAT_TEMPLATE, 'model_max_length': TINY.max_positions, 'clean_up_tokenization_spaces': False,
    }  # fmt: skip
    (folder / 'tokenizer_config.json').write_text(json.dumps(settings, indent=1))


def model_config(folder: pathlib.Path) -> dict:
    ids = {
        token: tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json')).token_to_id(token) for token in CONTROL
    }
    return {
        **TINY.to_config(), 'torch_dtype': 'float32',
        'eos_token_id': ids['<|im_end|>'], 'pad_token_id': ids['<|endoftext|>'], 'bos_token_id': None,
    }  # fmt: skip


# --- the stream and the update ---------------------------------------------------------------------------------------


def batches(tokenizer: Tokenizer, recipe: Recipe) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(ids i32[B,T], lengths i32[B], weights f32[B,T]) without end; T is a bucket, B*T about `recipe.tokens`."""
    rng = np.random.default_rng([recipe.seed, 3])
    first_world = FIRST_WORLD + 1_000_000 * recipe.seed
    waiting: dict[int, list] = {bucket: [] for bucket in BUCKETS}
    step = 0
    for world_seed in itertools.count(first_world):
        hops = 3 if recipe.start else 1 + (step >= recipe.steps * 0.15) + (step >= recipe.steps * 0.3)
        context_weight = recipe.context_weight * max(0.0, 1 - step / recipe.steps)
        for demonstration in demonstrations.play(world_seed, rng, recipe, hops, recipe.demonstrations_per_world):
            weight_of = {
                'context': context_weight,
                'observation': context_weight,
                'act': 1.0,
                'think': recipe.think_weight,
            }
            ids, weights = demonstrations.encode(demonstration, tokenizer, weight_of, OBSERVATION)
            bucket = next((b for b in BUCKETS if len(ids) <= b), None)
            if bucket is None:
                continue
            waiting[bucket].append((ids, weights))
            rows = max(1, recipe.tokens // bucket)
            if len(waiting[bucket]) == rows:
                yield _pad(waiting[bucket], bucket)
                waiting[bucket] = []
                step += 1


def _pad(rows: list, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids, weights = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), np.float32)
    for i, (row, weight) in enumerate(rows):
        ids[i, : len(row)], weights[i, : len(row)] = row, weight
    return ids, np.asarray([len(row) for row, _ in rows], np.int32), weights


def make_update(recipe: Recipe) -> tuple[optax.GradientTransformation, Callable]:
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, recipe.learning_rate, recipe.warmup, recipe.steps, recipe.learning_rate * 0.02
    )
    # Muon for the matrices of the layers, stacked [L, in, out]; AdamW for the embedding and the norms.
    stacked = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    dimensions = lambda tree: jax.tree.map(lambda leaf: stacked if leaf.ndim == 3 else None, tree)  # noqa: E731
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            schedule, weight_decay=recipe.weight_decay, adam_b2=0.98, adam_learning_rate=lambda step: schedule(step) * 0.15,
            muon_weight_dimension_numbers=dimensions,
        ),
    )  # fmt: skip

    def loss(params, ids, lengths, weights):
        hidden = transformer.hidden(params, TINY, ids, lengths)
        logits = transformer.logits(params, TINY, hidden[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
        is_action = weights[:, 1:] >= 1
        right = (logits.argmax(-1) == ids[:, 1:]) & is_action
        return (losses * weights[:, 1:]).sum() / weights.sum(), right.sum() / is_action.sum()

    @jax.jit
    def update(params, state, ids, lengths, weights):
        (value, accuracy), gradient = jax.value_and_grad(loss, has_aux=True)(params, ids, lengths, weights)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value, accuracy

    return optimizer, update
