"""Trains a policy for the lab from nothing, as the packaged `tiny` was: `python -m experiments.warm_start DIR`.

A Qwen3-family decoder of about 0.9 M parameters learns the protocol of the lab from scripted players in a stream of
fresh worlds (`worlds/demonstrations.py`): naive search, following the query template of a card whose trigger fits,
following a pointer now and then, and asking questions backwards from a target. It never sees the words that runs play
with. The recipe counts steps, not seconds, and depends on nothing but the seed.

What mattered, in the order of its size: the think line that repeats relation and template before the search; relation
names and key words that change with every world, so that following is learned in context; double loss weight on think
tokens; the curriculum of one, two, then three hops.

Left out: any reward. This is imitation; the loop in `experiments/train.py` is what learns from outcomes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import re
import time
from collections.abc import Callable, Iterator, Sequence

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
from sesa_jax.records import Document, Search, Target
from sesa_jax.rollout import episode
from sesa_jax.run.process import prepare
from sesa_jax.selfplay import prompts
from sesa_jax.skills import priming
from sesa_jax.worlds import demonstrations, lab
from sesa_jax.worlds.search import Corpus

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


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How `tiny` is made."""

    out: tyro.conf.Positional[pathlib.Path]
    """Folder to write; a Hugging Face model folder."""
    start: pathlib.Path | None = None
    """Go on from this folder's weights and tokenizer, with all numbers of hops from the first step."""
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
    world_size: float = 0.35
    challenger_share: float = 0.2
    no_card_share: float = 0.18
    easy_card_share: float = 0.7
    """How often a hop of an easy relation has a card of its own."""
    invented_share: float = 0.75
    """How often the template of such a card is made up, so that following it is all there is to learn."""
    one_hop_share: float = 0.4
    """Share of chains cut to one hop: short rows, more copying a token."""
    follow_pointer: float = 0.3
    """How often the solver of the demonstrations follows a pointer: what a policy without cards can get better at."""
    stop: int | None = None
    """Stop here on a schedule of `steps`."""
    seed: int = 0


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
            for transcript in play(seed, rng, Recipe(folder), hops=3, count=200):
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


# --- demonstrations --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """A transcript with what was read after each search."""

    user: str
    segments: tuple[tuple[str, str | Search], ...]  # kind 'think' or 'act' and its text, or 'observation'

    def text(self) -> list[str]:
        return [self.user, *(episode.observation(s) if isinstance(s, Search) else s for _, s in self.segments)]


def play(world_seed: int, rng: np.random.Generator, recipe: Recipe, hops: int, count: int) -> list[Demonstration]:
    """`count` demonstrations of up to `hops` hops in one fresh world of the warm half."""
    world = lab.build(world_seed, pool='warm', size=recipe.world_size, made_up_relations=bool(rng.random() < 0.6))
    corpus = Corpus(world.documents)
    engine = lambda query: corpus.search([query], 2)[0]  # noqa: E731
    chains = {h: world.chains('train', h) + world.chains('held_out', h) for h in range(1, hops + 1)}
    hard = {h: [c for c in chains[h] if any(world.relations[n].is_hard for n in c[1])] for h in chains}
    handwritten = [card.shown() for card in priming.handwritten()]
    made: list[Demonstration] = []
    while len(made) < count:
        kind = rng.random()
        depth = 1 if rng.random() < recipe.one_hop_share else int(rng.integers(1, hops + 1))
        if kind < recipe.challenger_share:
            transcript = _challenger(world, engine, depth, rng)
        else:
            pick = hard[depth] if rng.random() < 0.6 else chains[depth]
            chain = pick[int(rng.integers(len(pick)))]
            transcript = _solver(
                world, engine, chain, rng, recipe, handwritten, with_cards=kind < 1 - recipe.no_card_share
            )
        if transcript is not None:
            made.append(_record(transcript))
    return made


def _challenger(world, engine, hops: int, rng) -> demonstrations.Transcript | None:
    names = list(world.backward)
    people = [n for n in names if world.types[n] == 'person']
    answer = str(rng.choice(people if rng.random() < 0.5 else names))
    user = prompts.challenger(Target(answer, hops=hops), (), 'short')
    transcript, chain = demonstrations.challenge(world, engine, answer, hops, rng, user=user)
    return transcript if chain is not None else None


def _solver(world, engine, chain, rng, recipe: Recipe, handwritten: Sequence[str], *, with_cards: bool):
    start, nouns, _ = chain
    question = lab.ask(world, start, nouns, rng)
    cards: list[demonstrations.ShownCard] = []
    if with_cards:
        for noun in nouns:
            relation = world.relations[noun]
            if relation.is_hard and rng.random() < 0.75:
                template = '{entity} ' + ' '.join(relation.keys)
                cards.append(demonstrations.make_card(noun, template, rng))
            elif not relation.is_hard and rng.random() < recipe.easy_card_share:
                is_invented = rng.random() < recipe.invented_share
                template = demonstrations.invent_template(rng) if is_invented else f'{{entity}} {noun}'
                cards.append(demonstrations.make_card(noun, template, rng))
        cards = cards[:3]
        others = [n for n in world.relations if n not in nouns]
        while len(cards) < 3 and rng.random() < 0.93:
            if rng.random() < 0.25:
                cards.append(demonstrations.ShownCard('', '', str(rng.choice(handwritten))))
            else:
                noun = str(rng.choice(others))
                keys = world.relations[noun].keys
                template = f'{{entity}} {noun}' if keys is None else '{entity} ' + ' '.join(keys)
                template = demonstrations.invent_template(rng) if rng.random() < 0.2 else template
                cards.append(demonstrations.make_card(noun, template, rng))
        cards = [cards[i] for i in rng.permutation(len(cards))]
    user = prompts.solver(question, [c.text for c in cards], 'short')
    transcript, answer = demonstrations.solve(
        world,
        engine,
        start,
        nouns,
        question,
        rng,
        user=user,
        cards=cards,
        follow_pointer=recipe.follow_pointer,
        vary=0.08,
    )
    return transcript if answer else None


def _record(transcript: demonstrations.Transcript) -> Demonstration:
    found: Iterator[Sequence[Document]] = iter(transcript.documents)
    segments: list[tuple[str, str | Search]] = []
    for kind, text in transcript.segments:
        if kind == 'search':
            documents = tuple(next(found))
            segments.append(('observation', Search(text, documents, 'ok' if documents else 'empty', 0.0)))
        else:
            segments.append((kind, text))
    return Demonstration(transcript.user, tuple(segments))


def encode(
    demonstration: Demonstration, tokenizer: Tokenizer, think_weight: float, context_weight: float
) -> tuple[np.ndarray, np.ndarray]:
    """Ids i32[T] and loss weights f32[T]."""
    weight_of = {'observation': context_weight, 'act': 1.0, 'think': think_weight}
    ids = list(tokenizer.chat(None, demonstration.user))
    weights = [context_weight] * len(ids)
    for kind, segment in demonstration.segments:
        if isinstance(segment, Search):
            piece = episode.encode_observation(tokenizer.encode, segment, OBSERVATION)
        else:
            piece = tokenizer.encode(segment)
        ids += piece
        weights += [weight_of[kind]] * len(piece)
    return np.asarray(ids, np.int32), np.asarray(weights, np.float32)


def batches(tokenizer: Tokenizer, recipe: Recipe) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(ids i32[B,T], lengths i32[B], weights f32[B,T]) without end; T is a bucket, B*T about `recipe.tokens`."""
    rng = np.random.default_rng([recipe.seed, 3])
    first_world = FIRST_WORLD + 1_000_000 * recipe.seed
    waiting: dict[int, list] = {bucket: [] for bucket in BUCKETS}
    step = 0
    for world_seed in itertools.count(first_world):
        hops = 3 if recipe.start else 1 + (step >= recipe.steps * 0.15) + (step >= recipe.steps * 0.3)
        context_weight = recipe.context_weight * max(0.0, 1 - step / recipe.steps)
        for demonstration in play(world_seed, rng, recipe, hops, recipe.demonstrations_per_world):
            ids, weights = encode(demonstration, tokenizer, recipe.think_weight, context_weight)
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


# --- training --------------------------------------------------------------------------------------------------------


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


def main(recipe: Recipe) -> None:
    began = time.monotonic()
    prepare()
    if recipe.start is None:
        train_tokenizer(recipe.out)
        (recipe.out / 'config.json').write_text(json.dumps(model_config(recipe.out), indent=1))
        tokenizer = Tokenizer(recipe.out)
        params = transformer.init(TINY, jax.random.key(recipe.seed))
    else:
        tokenizer = Tokenizer(recipe.start)
        params = hf.load_params(recipe.start, TINY)
    settings = model_config(recipe.start or recipe.out)
    optimizer, update = make_update(recipe)
    state = optimizer.init(params)
    sums = np.zeros(2)
    for step, (ids, lengths, weights) in enumerate(batches(tokenizer, recipe), start=1):
        params, state, value, accuracy = update(params, state, jnp.asarray(ids), jnp.asarray(lengths), weights)
        sums += [float(value), float(accuracy)]
        if step % 100 == 0 or step == recipe.steps:
            loss, right = sums / (step % 100 or 100)
            print(
                f'step {step}/{recipe.steps} loss {loss:.4f} right {right:.4f} {time.monotonic() - began:.0f}s',
                flush=True,
            )
            sums[:] = 0
        if step % 500 == 0 or step in (recipe.steps, recipe.stop):
            hf.save(recipe.out, TINY, params, settings, recipe.start or recipe.out)
        if step in (recipe.steps, recipe.stop):
            return


if __name__ == '__main__':
    main(tyro.cli(Recipe, description=__doc__))
