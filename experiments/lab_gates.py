"""Is the lab fair, and can `tiny` play in it? `python -m experiments.lab_gates` prints the table of docs/lab.md.

Seven gates, on worlds that no training saw: easy questions are solvable without cards, hard ones hardly, the right card
solves them, the encoder finds it, the offline distiller writes it from evidence, the challenger asks valid questions, and
scripted players give the scale. No method is compared with another here. Some minutes a seed on two cores.
"""

from __future__ import annotations

import os

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import contextlib
import dataclasses
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import tyro

from sesa_jax import config
from sesa_jax.config import Run
from sesa_jax.evals.statistics import wilson
from sesa_jax.host.client import HostClient, HostProcess
from sesa_jax.records import Failure, Question, Target
from sesa_jax.rollout.row import Request
from sesa_jax.run.process import prepare
from sesa_jax.selfplay import challenger, setup, solver
from sesa_jax.selfplay.game import Game
from sesa_jax.skills import distill
from sesa_jax.skills.card import Card, DraftCard
from sesa_jax.skills.encoder import index_of
from sesa_jax.worlds import demonstrations, lab
from sesa_jax.worlds.search import Corpus


@dataclasses.dataclass(frozen=True)
class Arguments:
    """See the module's docstring."""

    seeds: tuple[int, ...] = (100,)
    """World seeds; 0 to 9 are for figures that are reported, development looks from 100 up."""
    model: str = 'tiny'
    per_cell: int = 100
    rollouts: int = 5


Cells = dict[str, list[float]]


def play(
    game: Game, params, questions: Sequence[Question], cards: Sequence[Sequence[str]], rollouts: int, temperature: float
) -> list[list[bool]]:
    """Right or wrong of each rollout of each question, with the given card texts in the prompt."""
    requests = [
        Request('solver', q.id, i, sample, game.solver_prompt(q.text, shown), temperature, game.run.solver.max_turns)
        for i, (q, shown) in enumerate(zip(questions, cards, strict=True))
        for sample in range(rollouts)
    ]
    rows = game.rollout(params, requests, 'solver', step=1, weights_version=0, purpose='gates')
    asked = [(questions[r.problem].text, questions[r.problem].answers) for r in requests]
    outcomes = solver.judge(game.host, rows, asked)
    right = [o.kind == 'correct' for o in outcomes]
    return [right[i * rollouts : (i + 1) * rollouts] for i in range(len(questions))]


def relation_card(world: lab.World, noun: str) -> DraftCard:
    """The right card of a relation, in the form that the offline distiller writes."""
    keys = world.relations[noun].keys
    template = '{entity} ' + (' '.join(keys) if keys else noun)
    return distill.draft(noun, template)


def gate_solver(game: Game, params, found: Cells, per_cell: int, rollouts: int) -> None:
    """Gates 1 to 3."""
    world = game.world
    questions = world.questions('held_out', per_cell, seed=3)
    rng = np.random.default_rng(5)
    right_cards, other_cards = [], []
    for question in questions:
        hard = [n for n in question.tags if n in world.relations]
        others = [n for n in world.relations if f' {n} ' not in f' {question.text} ']
        shown = [relation_card(world, str(n)).shown() for n in rng.permutation(others)[:3]]
        other_cards.append(shown)
        right_cards.append([*shown[:1], *(relation_card(world, n).shown() for n in hard), *shown[1:2]])
    for name, cards, temperature, count in (
        ('no card', [[]] * len(questions), 1.0, rollouts),
        ('right card', right_cards, 1.0, rollouts),
        ('right card, greedy', right_cards, 0.0, 1),
        ('unrelated cards', other_cards, 1.0, rollouts),
    ):
        for question, right in zip(questions, play(game, params, questions, cards, count, temperature), strict=True):
            cell = f'{question.kind} {question.hops}'
            found[f'{cell} | {name}'] += right
            if question.kind == 'hard' and name == 'no card':
                found[f'{cell} | no card, {question.tags[1]}'] += right
                found[f'{cell} | no card, groups at the frontier'].append(0 < sum(right) < count)
                found[f'{cell} | no card, {question.tags[1]}, groups at the frontier'].append(0 < sum(right) < count)


def gate_encoder(world: lab.World, found: Cells) -> None:
    """Gate 4: the right card among 100: those of the world's relations, and made-up ones in the same form."""
    rng = np.random.default_rng(7)
    nouns = list(world.relations)
    invented = [str(word) for word in rng.choice(lab.words('warm'), 100 - len(nouns), replace=False)]
    drafts = [relation_card(world, noun) for noun in nouns]
    drafts += [distill.draft(noun, demonstrations.invent_template(rng, 'warm')) for noun in invented]
    cards = [Card(id=f'c{i:03d}', **dataclasses.asdict(draft)) for i, draft in enumerate(drafts)]
    index = index_of(cards)
    for question in world.questions('held_out', 100, seed=4):
        if question.kind == 'hard':
            wanted = f'c{nouns.index(question.tags[0]):03d}'
            hit = wanted in [card.id for card, _ in index.retrieve(question.text, 3)]
            found['recall@3'].append(hit)
            found[f'recall@3 {question.tags[0]}'].append(hit)


def gate_distiller(game: Game, params, found: Cells, rollouts: int) -> None:
    """Gate 5: failures whose evidence names the key words -> a right card -> success on other entities."""
    world = game.world
    hard = [q for q in world.questions('train', 200, seed=6) if q.kind == 'hard' and 'pointer' in q.tags]
    failures = played_failures(game, params, hard, rollouts)
    cards: dict[str, DraftCard] = {}
    for noun, failure in failures:
        keys = ' '.join(world.relations[noun].keys or ())
        if any(keys in d.text and d.title != keys for d in failure.evidence):
            drafts = distill.distill([failure])
            good = [d for d in drafts if d.queries[0] == f'{{entity}} {keys}' and noun in d.trigger]
            found['failure with the key words -> right card'].append(bool(good))
            cards.update([(noun, draft) for draft in good])
    others = [q for q in world.questions('held_out', 100, seed=8) if q.tags[:1] and q.tags[0] in cards and q.hops == 1]
    others = [q for q in others if 'no pointer' in q.tags]
    for name, shown in (
        ('distilled card', [[cards[q.tags[0]].shown()] for q in others]),
        ('no card', [[]] * len(others)),
    ):
        for right in play(game, params, others, shown, rollouts, 1.0):
            found[f'other entities, no pointer | {name}'] += right
    for wordings, name in ((lab.POINTERS, 'usual'), (lab.UNUSUAL_POINTERS, 'unwritten-for')):
        for right in scripted_failures(game.run.seed, wordings):
            found[f'scripted failure, {name} wording -> right card'].append(right)


def played_failures(game: Game, params, questions, rollouts: int) -> list[tuple[str, Failure]]:
    requests = [
        Request('solver', q.id, i, s, game.solver_prompt(q.text, ()), 1.0, game.run.solver.max_turns)
        for i, q in enumerate(questions) for s in range(rollouts)
    ]  # fmt: skip
    rows = game.rollout(params, requests, 'solver', step=2, weights_version=0, purpose='gates')
    outcomes = solver.judge(
        game.host, rows, [(questions[r.problem].text, questions[r.problem].answers) for r in requests]
    )
    failures = []
    for request, row, outcome in zip(requests, rows, outcomes, strict=True):
        if outcome.kind == 'wrong':
            question = questions[request.problem]
            problem = challenger.Problem(question.id, 0, question.text, Target(question.answers[0]))
            failures.append((question.tags[0], solver.record(row, outcome, problem, 1)))
    return failures


def scripted_failures(seed: int, wordings: Sequence[str]) -> list[bool]:
    """Whether a naive player's failure beside a pointer becomes the right card, for pointers in given words."""
    world = lab.build(seed, pointer_wordings=wordings)
    corpus = Corpus(world.documents)
    rng = np.random.default_rng(9)
    results = []
    for start, nouns, end in [c for c in world.chains('train', 1) if world.relations[c[1][0]].is_hard]:
        if start not in world.pointers:
            continue
        noun, question = nouns[0], lab.ask(world, start, nouns, rng)
        script, answer = demonstrations.solve(
            world, lambda query: corpus.search([query], 2)[0], start, nouns, question, rng, user=question
        )
        evidence = tuple(dict.fromkeys(d for documents in script.documents for d in documents))
        keys = ' '.join(world.relations[noun].keys or ())
        if any(keys in d.text and d.title != keys for d in evidence):
            queries = tuple(text for kind, text in script.segments if kind == 'search')
            failure = Failure('scripted', 1, question, Target(end), answer, evidence, queries, (), 0)
            results.append(any(d.queries[0] == f'{{entity}} {keys}' for d in distill.distill([failure])))
    return results


def gate_challenger(game: Game, params, found: Cells, batches: int = 8) -> Counter:
    """Gate 6."""
    reasons: Counter[str] = Counter()
    for step in range(1, batches + 1):
        targets = game.world.targets(game.run.problems, step, game.run.seed)
        posed = challenger.pose(game, params, targets, step=step, weights_version=0)
        found['valid questions'] += [0.0] * len(posed.rejected) + [1.0] * len(posed.problems)
        reasons.update(reject.reason for reject in posed.rejected)
        for problem in posed.problems:
            is_hard = any(f' {n} ' in f' {problem.question} ' for n, r in game.world.relations.items() if r.is_hard)
            found['hard among the valid'].append(is_hard)
    return reasons


def gate_scripted(world: lab.World, found: Cells) -> None:
    """Gate 7."""
    corpus = Corpus(world.documents)
    engine = lambda query: corpus.search([query], 2)[0]  # noqa: E731
    rng = np.random.default_rng(11)
    for question in world.questions('held_out', 100, seed=10):
        start = question.text.rstrip('.?').split()[-1]
        nouns = tuple(reversed([w for w in question.text.split() if w in world.relations]))
        for name, knows in (('naive', False), ('keyed', True)):
            _, answer = demonstrations.solve(world, engine, start, nouns, question.text, rng, user='', knows_keys=knows)
            found[f'scripted {name} {question.kind}'].append(answer in question.answers)
            if question.kind == 'hard' and knows and question.hops == 1:
                found[f'scripted keyed {question.tags[0]}'].append(answer in question.answers)


def measure(seed: int, arguments: Arguments, found: Cells) -> Counter:
    run = dataclasses.replace(config.lab_preset(Run()), seed=seed, model=arguments.model, run_dir='')
    backbone = setup.load(run)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        host = stack.enter_context(HostClient(stack.enter_context(HostProcess.start(folder, config.to_json(run)))))
        game = setup.make_game(run, backbone, host)
        gate_scripted(game.world, found)
        gate_encoder(game.world, found)
        gate_solver(game, backbone.params, found, arguments.per_cell, arguments.rollouts)
        gate_distiller(game, backbone.params, found, arguments.rollouts)
        return gate_challenger(game, backbone.params, found)


def main(arguments: Sequence[str] | None = None) -> int:
    prepare()
    given = tyro.cli(Arguments, args=arguments, description=__doc__)
    found: Cells = defaultdict(list)
    reasons: Counter[str] = Counter()
    for seed in given.seeds:
        reasons += measure(seed, given, found)
    print(f'seeds {", ".join(map(str, given.seeds))}\n')
    print('| what | rate | 95% | n |\n|---|---|---|---|')
    for name in sorted(found):
        values = found[name]
        low, high = wilson(int(sum(values)), len(values))
        print(f'| {name.replace("|", "·")} | {np.mean(values):.3f} | {low:.3f} to {high:.3f} | {len(values)} |')
    print('\nwhy questions were not valid:', ', '.join(f'{k} {n}' for k, n in reasons.most_common()))
    return 0


if __name__ == '__main__':
    sys.exit(main())
