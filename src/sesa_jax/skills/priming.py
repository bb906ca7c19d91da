"""Memory priming: the cards that a run starts with, fifteen handwritten ones and those mined from early play.

The handwritten cards are general search craft and name no data set, domain or world. The mined ones come from rollouts
before step 1 (`selfplay/bootstrap.py`), so they have rollout ids and a source question like any distilled card.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources

from sesa_jax.config import Bank
from sesa_jax.skills import consolidate
from sesa_jax.skills.card import DraftCard, draft_from_json
from sesa_jax.skills.encoder import Encoder, get_encoder

DISTILLER = 'handwritten'


def handwritten() -> list[DraftCard]:
    """The fifteen cards of `assets/cards/seeds.json`, in order."""
    text = resources.files('sesa_jax').joinpath('assets/cards/seeds.json').read_text('utf-8')
    return [draft_from_json({**data, 'distiller': DISTILLER}) for data in json.loads(text)]


def seeds(
    written: Sequence[DraftCard], mined: Sequence[DraftCard], config: Bank, encoder: Encoder | None = None
) -> list[DraftCard]:
    """The first cards of a bank: the written ones, then the first `config.mined` valid mined ones that repeat none.

    At most `config.capacity` in all. Pure and deterministic; `Bank.create` takes the result.
    """
    encoder = encoder or get_encoder(config.encoder)
    verdicts = consolidate.admit([*written, *mined], (), encoder, config.threshold)[len(written) :]
    new = [verdict.draft for verdict in verdicts if not verdict.reason]
    room = max(0, config.capacity - len(written))
    return [*written, *new[: min(config.mined, room)]]
