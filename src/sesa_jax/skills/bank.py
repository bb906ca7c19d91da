"""The skill bank: cards, their counters and the queue of failures, kept as an append-only event log.

One process (the host process) writes; each public write is one event in one transaction, so a crash leaves the bank
before or after it, never in between. Events record what was decided (which failures were dropped, which cards left and
why), so reading the log back needs neither config nor encoder. The log's chain hash names the whole state. Nothing in
an event depends on a clock.

Time runs in steps from 1. `commit_step(t)` closes step t; a consolidation starts and commits at the boundary behind a
step, after its commit. `snapshot(t)` is the bank behind that boundary, which the solvers of step t + 1 see. Left out:
the distiller's call (`distill.py`, run by the host), and import and export.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sesa_jax import records
from sesa_jax.config import Bank as BankConfig
from sesa_jax.records import Failure
from sesa_jax.skills import consolidate, lineage
from sesa_jax.skills.card import Card, DraftCard, to_json
from sesa_jax.skills.encoder import Encoder, Index, get_encoder
from sesa_jax.skills.lineage import Lineage, Use
from sesa_jax.skills.log import FORMAT, BankError, CorruptBank, EventLog, canonical, digest
from sesa_jax.skills.state import COUNTERS, Job, State, credited

__all__ = ['Bank', 'BankError', 'CorruptBank', 'Job', 'Lineage', 'Snapshot', 'Use']

KEPT_SNAPSHOTS = 4


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The active cards behind one boundary: frozen, and what retrieval reads."""

    version: int  # the step that the boundary is behind; 0: the seed bank
    cards: tuple[Card, ...]  # by id
    hash: str  # of the cards, counters included
    encoder: Encoder = dataclasses.field(repr=False, compare=False)

    def retrieve(self, question: str, k: int, exclude: Collection[str] = ()) -> list[Card]:
        """The k best cards; see `Index.retrieve`."""
        return [card for card, _ in self.index.retrieve(question, k, exclude)]

    @functools.cached_property
    def index(self) -> Index:
        return Index(self.cards, self.encoder)


class Bank:
    """A bank on disk. For one thread at a time; its snapshots may be read by others."""

    def __init__(
        self,
        log: EventLog,
        state: State,
        config: BankConfig,
        *,
        encoder: Encoder | None = None,
        freeze_bank: bool = False,
        failure_distillation: bool = True,
    ) -> None:
        """Use `create` or `open`."""
        self.config = config
        self.freeze_bank = freeze_bank
        self.failure_distillation = failure_distillation
        self._log = log
        self._state = state
        self._encoder = encoder
        self._snapshots: dict[tuple[int, int], Snapshot] = {}

    @classmethod
    def create(
        cls,
        path: str | Path,
        seeds: Sequence[DraftCard] = (),
        config: BankConfig | None = None,
        *,
        encoder: Encoder | None = None,
        freeze_bank: bool = False,
        failure_distillation: bool = True,
    ) -> Bank:
        """A new bank with its first cards; the file appears whole or not at all.

        Args:
          seeds: Handwritten cards and cards mined from play before step 1 (those have rollout ids), in order of
            precedence. Repetitions are left out. Mined ones are permanent with `mined_are_seeds` only.

        Raises:
          BankError: The file exists, or there are more seeds than places.
        """
        config = config or BankConfig()
        used = encoder or get_encoder(config.encoder)
        if len(seeds) > config.capacity:
            raise BankError(f'{len(seeds)} seed cards, but the bank holds {config.capacity} (--bank.capacity)')
        verdicts = consolidate.admit(seeds, (), used, config.threshold)
        entering = [verdict.draft for verdict in verdicts if not verdict.reason]
        cards = [
            lineage.new_card(draft, number, is_seed=config.mined_are_seeds or not draft.rollout_ids)
            for number, draft in enumerate(entering, 1)
        ]
        created = {
            'kind': 'created',
            'step': 0,
            'format': FORMAT,
            'encoder': used.name,
            'admitted': [to_json(card) for card in cards],
            'rejected': [lineage.rejection(verdict, (), seeds) for verdict in verdicts if verdict.reason],
        }
        EventLog.create(Path(path), [created])
        return cls.open(
            path, config, encoder=encoder, freeze_bank=freeze_bank, failure_distillation=failure_distillation
        )

    @classmethod
    def open(
        cls,
        path: str | Path,
        config: BankConfig | None = None,
        *,
        at_seq: int | None = None,
        chain_hash: str | None = None,
        readonly: bool = False,
        encoder: Encoder | None = None,
        freeze_bank: bool = False,
        failure_distillation: bool = True,
    ) -> Bank:
        """An existing bank, its hash chain checked.

        Args:
          at_seq: Go back to this event; later ones move to the table `orphaned` (with `readonly` they are not read).
          chain_hash: What the chain hash must then be.
          readonly: Work on a private copy; the file is neither locked nor changed, and a writer may be at work.

        Raises:
          CorruptBank: The file is damaged, is no bank, or lacks what was asked for. Nothing was changed.
        """
        log = EventLog(Path(path), readonly=readonly)
        try:
            state = State()
            for seq, event in log.verified(at_seq):
                state.apply(seq, event)
            if chain_hash is not None and log.hash.hex() != chain_hash:
                raise CorruptBank(log.path, f'event {log.seq} has hash {log.hash.hex()[:12]}, not {chain_hash[:12]}')
            if not readonly:
                log.cut()
        except BaseException:
            log.close()
            raise
        return cls(
            log,
            state,
            config or BankConfig(),
            encoder=encoder,
            freeze_bank=freeze_bank,
            failure_distillation=failure_distillation,
        )

    @classmethod
    def verify(cls, path: str | Path, seq: int, chain_hash: str) -> None:
        """Raises CorruptBank unless the file holds event `seq` with this chain hash. Changes nothing."""
        cls.open(path, at_seq=seq, chain_hash=chain_hash, readonly=True).close()

    def close(self) -> None:
        self._log.close()

    def __enter__(self) -> Bank:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What the bank is.

    @property
    def seq(self) -> int:
        """Number of the last event."""
        return self._log.seq

    @property
    def chain_hash(self) -> str:
        """Hex hash of all events; banks with equal chain hashes are equal."""
        return self._log.hash.hex()

    @property
    def queue_hash(self) -> str:
        """Hex hash of the waiting failures and of the consolidation under way."""
        return digest({'queue': [records.to_json(failure) for failure in self.queue()], 'job': self._state.job})

    @property
    def step(self) -> int:
        """The last committed step."""
        return self._state.step

    @functools.cached_property
    def encoder(self) -> Encoder:
        return self._encoder or get_encoder(self.config.encoder)

    def active(self) -> list[Card]:
        """Cards that can be retrieved, by id."""
        return [self._state.cards[card_id] for card_id in sorted(self._state.cards)]

    def cards(self) -> list[Card]:
        """Active cards and tombstones, by id."""
        everything = {**self._state.cards, **self._state.tombstones}
        return [everything[card_id] for card_id in sorted(everything)]

    def queue(self) -> list[Failure]:
        """Waiting failures, oldest first; those of a consolidation under way are among them."""
        return list(self._state.queue.values())

    def counts(self) -> dict[str, int]:
        """Sizes, and totals since the start: drafts = admitted + rejected by reason; admitted = active + tombstones."""
        state = self._state
        totals = ('drafts', 'admitted', 'failures', 'dropped', 'consolidated')
        return {
            'active': len(state.cards),
            'seeds': sum(card.is_seed for card in state.cards.values()),
            'tombstones': len(state.tombstones),
            'queue': len(state.queue),
            'in_job': len(state.job[1]) if state.job else 0,
            **dict.fromkeys(totals, 0),
            **dict(sorted(state.totals.items())),
        }

    def dump(self) -> bytes:
        """The whole state as canonical bytes."""
        return canonical({'seq': self.seq, 'chain_hash': self.chain_hash, **self._state.as_json()})

    def snapshot(self, version: int | None = None) -> Snapshot:
        """The active cards behind the boundary of step `version`, also of an earlier one (default: as it is now).

        Raises:
          BankError: The bank has not reached that step.
        """
        version = self.step if version is None else version
        if not 0 <= version <= self.step:
            raise BankError(f'{self._log.path}: no snapshot {version}, the last committed step is {self.step}')
        # The newest version still changes when a consolidation commits behind the same step.
        key = (version, self.seq if version == self.step else 0)
        if key not in self._snapshots:
            state = self._state if version == self.step else self._state_at(version)
            cards = tuple(state.cards[card_id] for card_id in sorted(state.cards))
            while len(self._snapshots) >= KEPT_SNAPSHOTS:
                del self._snapshots[next(iter(self._snapshots))]
            self._snapshots[key] = Snapshot(version, cards, digest([to_json(card) for card in cards]), self.encoder)
        return self._snapshots[key]

    # What changes it.

    def commit_step(
        self,
        step: int,
        retrieved: Mapping[str, int],
        helpful: Mapping[str, int],
        hurt: Mapping[str, int],
        failures: Sequence[Failure] = (),
    ) -> dict[str, Any]:
        """Close a step in one transaction: counters, new failures, evictions. Repeating it changes nothing.

        Args:
          step: The one after the last committed step, or an earlier one with the same arguments as then.
          retrieved, helpful, hurt: Card id -> increment. Cards that left since they were shown are counted too.
          failures: In row order; ignored without failure distillation.

        Returns:
          The event: `failures` that entered the queue, `turned_away` ones that found no place, ids of older ones that
          were `dropped` for them, `evicted` card ids with reasons.

        Raises:
          BankError: The step does not follow, a card is unknown, a failure is reported twice or of another step.
        """
        counters = {
            name: {card_id: int(count) for card_id, count in counts.items() if count}
            for name, counts in zip(COUNTERS, (retrieved, helpful, hurt), strict=True)
        }
        failures = tuple(failures) if self.failure_distillation else ()
        request = digest([counters, [records.to_json(failure) for failure in failures]])
        if (before := self._repeated(f'step {step}', request)) is not None:
            return before
        self._check_step(step, counters, failures)
        surplus = self._surplus(failures, step)
        turned_away = [failure for failure in failures if failure.rollout_id in surplus]
        return self._append(
            {
                'kind': 'step',
                'step': step,
                'request': request,
                **counters,
                'failures': [records.to_json(failure) for failure in failures if failure.rollout_id not in surplus],
                # Without their text: a large batch would fill the log with evidence that nobody reads.
                'turned_away': [{'rollout_id': f.rollout_id, 'target_hash': f.target.hash} for f in turned_away],
                'dropped': [rollout_id for rollout_id in self._state.queue if rollout_id in surplus],
                'evicted': self._evictions([credited(card, counters) for card in self.active()], step),
            }
        )

    def start_consolidation(self, step: int) -> list[Failure]:
        """Start a consolidation at the boundary behind `step` if one is due; [] if not.

        The failures stay in the queue until `finish_consolidation`. Calling it again for the same step gives the same
        failures, as long as the consolidation is under way.
        """
        if (job := self.pending_consolidation()) is not None:
            return list(job.failures) if job.step == step else []
        self._check_boundary(step)
        due = consolidate.is_due(
            step,
            len(self._state.queue),
            self.config,
            freeze_bank=self.freeze_bank,
            failure_distillation=self.failure_distillation,
        )
        if not due or f'started {step}' in self._state.done:
            return []
        taken = consolidate.take(self.queue(), self._state.first_failed, self.config.at_most)
        self._append({'kind': 'started', 'step': step, 'taken': [failure.rollout_id for failure in taken]})
        return taken

    def pending_consolidation(self) -> Job | None:
        """The consolidation that was started and not finished, also after reopening."""
        if self._state.job is None:
            return None
        step, taken = self._state.job
        return Job(step, tuple(self._state.queue[rollout_id] for rollout_id in taken))

    def finish_consolidation(self, step: int, drafts: Sequence[DraftCard], error: str | None = None) -> dict[str, Any]:
        """Commit the consolidation under way at the boundary behind `step`. Repeating it changes nothing.

        Without `error` the valid, new drafts become cards and the failures leave the queue. With it (a stable reason:
        it is hashed, so no times and no addresses) nothing enters, and the failures wait for the next slot.

        Returns:
          The event: `admitted` cards, `rejected` drafts with reasons, `evicted` card ids with reasons.

        Raises:
          BankError: Nothing is under way, the step is not the last committed one, or the bank is frozen.
        """
        drafts = () if error is not None else tuple(drafts)
        request = digest([[to_json(draft) for draft in drafts], error])
        if (before := self._repeated(f'finished {step}', request)) is not None:
            return before
        job = self.pending_consolidation()
        if job is None:
            raise BankError(f'{self._log.path}: no consolidation is under way at step {step}')
        if self.freeze_bank and error is None:
            raise BankError(f'{self._log.path}: the bank is frozen, a consolidation cannot commit')
        self._check_boundary(step)
        sources = {failure.rollout_id: failure for failure in job.failures}
        faults = [lineage.source_fault(draft, sources) for draft in drafts]
        known = self.cards()
        verdicts = consolidate.admit(drafts, known, self.encoder, self.config.threshold, faults)
        entering = [verdict.draft for verdict in verdicts if not verdict.reason]
        admitted = [lineage.distilled_card(draft, len(known) + i, step, sources) for i, draft in enumerate(entering, 1)]
        return self._append(
            {
                'kind': 'finished',
                'step': step,
                'request': request,
                'started': job.step,
                'error': error,
                'encoder': self.encoder.name,
                'admitted': [to_json(card) for card in admitted],
                'rejected': [lineage.rejection(verdict, known, drafts) for verdict in verdicts if verdict.reason],
                'evicted': self._evictions([*self.active(), *admitted], step),
            }
        )

    # What happened.

    def history(self) -> Iterator[dict[str, Any]]:
        """All events, oldest first, each with its `seq`."""
        for seq, event in self._log.events():
            yield {'seq': seq, **event}

    def why(self, card_id: str) -> Lineage:
        """Where a card, active or evicted, came from and how it was used.

        Raises:
          KeyError: No card ever had this id.
        """
        return lineage.trace(card_id, self.cards(), self.history(), self._log.path)

    # Inside.

    def _append(self, event: Mapping[str, Any]) -> dict[str, Any]:
        recorded = self._log.append(event)
        self._state.apply(self._log.seq, recorded)
        return recorded

    def _state_at(self, version: int) -> State:
        state = State()
        for seq, event in self._log.events():
            if event['step'] > version:
                break
            state.apply(seq, event)
        return state

    def _surplus(self, failures: Sequence[Failure], step: int) -> set[str]:
        """Rollout ids, old or new, for which the queue has no room."""
        first_failed = dict(self._state.first_failed)
        for failure in failures:
            first_failed.setdefault(failure.target.hash, step)
        taken = self._state.job[1] if self._state.job else ()
        dropped = consolidate.overflow([*self.queue(), *failures], first_failed, self.config.queue, taken)
        return {failure.rollout_id for failure in dropped}

    def _evictions(self, cards: Sequence[Card], step: int) -> dict[str, str]:
        return {} if self.freeze_bank else consolidate.evictions(cards, step, self.config)

    def _repeated(self, key: str, request: str) -> dict[str, Any] | None:
        """The event that already did this, None if there is none; refuses another request under the same name."""
        if (seq := self._state.done.get(key)) is None:
            return None
        event = self._log.event(seq)
        if event['request'] != request:
            raise BankError(f'{self._log.path}: "{key}" was committed before, with other contents')
        return event

    def _check_boundary(self, step: int) -> None:
        if step != self.step:
            raise BankError(
                f'{self._log.path}: a consolidation behind step {step}, but the last committed step is {self.step}; '
                'consolidations start and commit right after the commit of their step'
            )

    def _check_step(self, step: int, counters: Mapping[str, Mapping[str, int]], failures: Sequence[Failure]) -> None:
        where = f'{self._log.path}: step {step}'
        if step != self.step + 1:
            raise BankError(f'{where} cannot follow step {self.step}')
        for name, counts in counters.items():
            for card_id, count in counts.items():
                if card_id not in self._state.cards and card_id not in self._state.tombstones:
                    raise BankError(f'{where}: {name} names card {card_id!r}, which this bank never had')
                if count < 0:
                    raise BankError(f'{where}: {name} of card {card_id} is {count}')
        ids = [*self._state.queue, *(failure.rollout_id for failure in failures)]
        if len(set(ids)) != len(ids):
            raise BankError(f'{where}: a failure was reported twice')
        if wrong := [failure.rollout_id for failure in failures if failure.step != step]:
            raise BankError(f'{where}: {wrong[0]} is not a failure of this step')
