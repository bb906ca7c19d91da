"""The bank against a plain model of it: random steps, consolidations, crashes, reopenings and roll-backs."""

import copy
import itertools
import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from skills_toy import SMALL, TableEncoder, again, crashed, draft, failure

from sesa_jax.skills.bank import Bank

FAMILIES = 'abcdefgh'


class FamilyEncoder(TableEncoder):
    """Cards of one family (the first letter of the trigger) are duplicates."""

    def similarity(self, drafts, known):
        everything = {card.trigger for card in (*known, *drafts)}
        self.cosines = {
            frozenset(pair): 0.99 if pair[0][0] == pair[1][0] else 0.1
            for pair in itertools.product(everything, everything)
        }
        return super().similarity(drafts, known)


ENCODER = FamilyEncoder()


@dataclass
class Model:
    """What the bank should hold, in the plainest form."""

    step: int = 0
    cards: list[dict] = field(default_factory=list)  # all that ever were; the place is the id
    queue: list[dict] = field(default_factory=list)
    failed: dict[str, int] = field(default_factory=dict)
    job: list[str] | None = None
    started: set[int] = field(default_factory=set)

    def add(self, family, is_seed):
        if any(card['family'] == family for card in self.cards):
            return
        new = {'family': family, 'is_seed': is_seed, 'born': self.step, 'gone': None}
        self.cards.append({**new, 'retrieved': 0, 'helpful': 0, 'hurt': 0})

    def is_slot(self):
        return self.step > 0 and self.step % SMALL.every == 0 and self.step not in self.started

    def active(self):
        return [card for card in self.cards if card['gone'] is None]

    def evict(self):
        def score(card):
            return card['helpful'] - card['hurt']

        for card in self.active():
            if not card['is_seed'] and card['retrieved'] >= 3 and score(card) < 0:
                card['gone'] = 'harmful'
        while len(self.active()) > SMALL.capacity:
            loose = [card for card in self.active() if not card['is_seed']]
            min(loose, key=lambda card: (score(card), card['born'], self.cards.index(card)))['gone'] = 'capacity'

    def urgency(self, waiting):
        return self.failed[waiting['target']] < waiting['step'], waiting['guided']

    def enqueue(self, new):
        for waiting in new:
            self.failed.setdefault(waiting['target'], self.step)
        self.queue += new
        while len(self.queue) > SMALL.queue:
            loose = [waiting for waiting in self.queue if waiting['id'] not in (self.job or ())]
            self.queue.remove(min(loose, key=lambda w: (self.urgency(w), self.queue.index(w))))

    def take(self):
        order = sorted(self.queue, key=lambda w: (self.urgency(w), self.queue.index(w)), reverse=True)
        return [waiting['id'] for waiting in order[: SMALL.at_most]]


class BankMachine(RuleBasedStateMachine):
    @initialize(seeds=st.lists(st.sampled_from(FAMILIES), max_size=3, unique=True))
    def create(self, seeds):
        self.folder = Path(tempfile.mkdtemp(prefix='bank-machine-'))
        self.files = itertools.count()
        self.bank = Bank.create(self.folder / 'bank.db', [draft(s) for s in seeds], SMALL, encoder=ENCODER)
        self.model = Model()
        for seed in seeds:
            self.model.add(seed, True)
        self.saved = {self.bank.seq: (copy.deepcopy(self.model), self.bank.chain_hash)}
        self.last = None

    def teardown(self):
        if hasattr(self, 'bank'):
            self.bank.close()
            shutil.rmtree(self.folder)

    def save(self):
        self.saved[self.bank.seq] = (copy.deepcopy(self.model), self.bank.chain_hash)

    @rule(data=st.data(), rows=st.lists(st.tuples(st.sampled_from('pqrstu'), st.booleans()), max_size=4))
    def commit(self, data, rows):
        model = self.model
        model.step += 1
        counts = (
            st.dictionaries(st.sampled_from(range(len(model.cards))), st.integers(1, 4)) if model.cards else st.just({})
        )
        changes = {name: data.draw(counts, name) for name in ('retrieved', 'helpful', 'hurt')}
        for name, change in changes.items():
            for index, count in change.items():
                model.cards[index][name] += count
        failures = [
            failure(model.step, row, target, ('c00001',) if guided else ()) for row, (target, guided) in enumerate(rows)
        ]
        named = [{f'c{index + 1:05d}': count for index, count in change.items()} for change in changes.values()]
        self.last = (model.step, *named, failures)
        self.bank.commit_step(*self.last)
        model.enqueue(
            [
                {'id': f.rollout_id, 'target': f.target.hash, 'step': f.step, 'guided': bool(f.card_ids)}
                for f in failures
            ]
        )
        model.evict()
        self.save()

    @precondition(lambda self: self.last is not None)
    @rule()
    def commit_again(self):
        if self.last[0] <= self.model.step:
            self.bank.commit_step(*self.last)

    @rule()
    def start(self):
        model = self.model
        expected = []
        if model.job is not None:
            expected = model.job if model.step in model.started else []
        elif model.is_slot() and len(model.queue) >= SMALL.at_least:
            expected = model.job = model.take()
            model.started.add(model.step)
        assert [f.rollout_id for f in self.bank.start_consolidation(model.step)] == expected
        self.save()

    @precondition(lambda self: self.model.job is not None)
    @rule(families=st.lists(st.sampled_from(FAMILIES), max_size=4), fails=st.booleans())
    def finish(self, families, fails):
        model = self.model
        source = self.bank.pending_consolidation().failures[0]
        # Every draft has a text of its own, so that the encoder decides.
        drafts = [draft(f'{family}{model.step}{i}', source) for i, family in enumerate(families)]
        self.bank.finish_consolidation(model.step, drafts, 'it failed' if fails else None)
        if not fails:
            for family in families:
                model.add(family, False)
            model.queue = [waiting for waiting in model.queue if waiting['id'] not in model.job]
            model.evict()
        model.job = None
        self.save()

    @rule()
    def close_and_open(self):
        self.bank.close()
        self.bank = again(self.bank)

    @rule()
    def crash(self):
        path = crashed(self.bank, self.folder / f'{next(self.files)}.db')
        self.bank.close()
        self.bank = again(self.bank, path)

    @rule(data=st.data())
    def go_back(self, data):
        seq = data.draw(st.integers(1, self.bank.seq), 'seq')
        self.bank.close()
        self.bank = again(self.bank, at_seq=seq)
        model, chain_hash = self.saved[seq]
        self.model = copy.deepcopy(model)
        assert self.bank.chain_hash == chain_hash

    @invariant()
    def bank_is_the_model(self):
        if not hasattr(self, 'bank'):
            return
        model, dump = self.model, json.loads(self.bank.dump())
        cards = [
            (c['trigger'][0], c['is_seed'], c['born_step'], c['evicted_reason'] or None, *(c[k] for k in COUNTERS))
            for c in dump['cards']
        ]
        expected = [(c['family'], c['is_seed'], c['born'], c['gone'], *(c[k] for k in COUNTERS)) for c in model.cards]
        assert cards == expected
        assert [c['id'] for c in dump['cards']] == [f'c{i:05d}' for i in range(1, len(cards) + 1)]
        assert [f.rollout_id for f in self.bank.queue()] == [waiting['id'] for waiting in model.queue]
        job = self.bank.pending_consolidation()
        assert (None if job is None else [f.rollout_id for f in job.failures]) == model.job
        assert self.bank.step == model.step
        assert len(self.bank.active()) <= SMALL.capacity
        snapshot = self.bank.snapshot()
        assert [c.id for c in snapshot.retrieve('?', 3)] == [c.id for c in self.bank.active()][:3]


COUNTERS = ('retrieved', 'helpful', 'hurt')

TestBank = BankMachine.TestCase
TestBank.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
