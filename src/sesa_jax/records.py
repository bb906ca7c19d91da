"""The nouns of a run: frozen records that pass between the game, the memory, the host process and the disk.

Nothing here knows JAX, a tokenizer or a file. Arrays are NumPy, with their shape in a comment; text is plain `str`.
`Card` lives in `skills/card.py`, `GroupScores` in `grpo/advantage.py`, `TrainState` in `grpo/learner.py` and
`CommitRecord` in `run/commit.py`, each beside the code that makes it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

Role = Literal['challenger', 'solver']
# 'answer' and 'question': the final tag came. 'length': a token budget ended the row. 'turns': a search on the last
# turn. 'malformed': a turn ended without a complete tag. 'outage': a search failed for good.
StopReason = Literal['answer', 'question', 'length', 'turns', 'malformed', 'outage']
OutcomeKind = Literal['correct', 'wrong', 'malformed', 'unjudged', 'outage']


@dataclasses.dataclass(frozen=True)
class Document:
    """One passage of the corpus, as a search returns it."""

    id: str
    title: str
    text: str


@dataclasses.dataclass(frozen=True)
class Target:
    """What a challenger starts from: an answer that some question must have."""

    answer: str
    aliases: tuple[str, ...] = ()
    hops: int = 1
    source: str = ''

    @property
    def golds(self) -> tuple[str, ...]:
        return (self.answer, *self.aliases)

    @property
    def hash(self) -> str:
        return text_hash(self.answer)


@dataclasses.dataclass(frozen=True)
class Question:
    """A question with known answers: from a data set, or held out for measuring."""

    id: str
    text: str
    answers: tuple[str, ...]
    kind: str  # the class that results are split by, such as 'easy' and 'hard' on the lab
    hops: int
    tags: tuple[str, ...] = ()  # finer facts for analysis, such as 'pointer'


@dataclasses.dataclass(frozen=True)
class Problem:
    """A valid question of this step, ready for the solver."""

    id: str  # unique in the run: 's<step>-p<slot>'
    slot: int  # the place in the step's batch, 0..M-1; RNG keys are folded from it
    question: str
    target: Target
    materials: tuple[str, ...] = ()  # texts of the searches that the question was made from
    challenger_row: int = -1  # index into the step's challenger trajectories; -1 where there was no challenger
    reused: bool = False

    @property
    def question_hash(self) -> str:
        return text_hash(self.question)


@dataclasses.dataclass(frozen=True)
class Rejected:
    """A challenger row without a valid question, and why (the names are those of `selfplay/checks.py`)."""

    reason: str
    row: int
    question: str = ''


@dataclasses.dataclass(frozen=True)
class Turn:
    """One assistant turn: its sampled text up to and including the tag that ended it, and its place in the row."""

    kind: Literal['search', 'answer', 'question', 'malformed']
    content: str  # the text between the tags, stripped; '' for a malformed turn
    start: int  # first action token of the turn, an index into Trajectory.ids
    end: int  # one past its last action token


@dataclasses.dataclass(frozen=True)
class Search:
    """One search call of a row."""

    query: str
    documents: tuple[Document, ...]
    outcome: Literal['ok', 'empty', 'outage']
    latency: float  # seconds; kept out of everything that must repeat bit for bit

    @property
    def text(self) -> str:
        """The retrieved documents as plain text, one block."""
        return '\n'.join(f'{d.title}: {d.text}' for d in self.documents)


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One rollout, token in / token out: prompt, then actions and observations, exactly as sampled (DESIGN 4-6)."""

    role: Role
    problem_id: str
    sample: int  # 0..G-1
    ids: np.ndarray  # i32[T]; prompt, actions and observations
    is_action: np.ndarray  # bool[T]; True on sampled tokens, the terminators of turns included
    logprobs: np.ndarray  # f32[T]; the sampler's, at its temperature; 0 where not is_action
    prompt_length: int
    turns: tuple[Turn, ...]
    searches: tuple[Search, ...]
    card_ids: tuple[str, ...]
    stop_reason: StopReason
    weights_version: int  # optimizer steps of the policy that sampled it
    bank_version: int  # step of the bank snapshot that its cards came from

    @property
    def final(self) -> str | None:
        """Content of the last complete answer or question tag, or None."""
        finals = [turn.content for turn in self.turns if turn.kind in ('answer', 'question')]
        return finals[-1] if finals else None

    @property
    def rollout_id(self) -> str:
        return f'{self.role}:{self.problem_id}:{self.sample}'


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a solver rollout was worth."""

    kind: OutcomeKind
    reward: float
    prediction: str


@dataclasses.dataclass(frozen=True)
class Failure:
    """A substantively wrong rollout on a frontier question: all that a distiller ever sees (DESIGN 15, LAB fairness)."""

    rollout_id: str
    step: int
    question: str
    target: Target
    prediction: str
    evidence: tuple[Document, ...]  # from all turns, in order, duplicates removed
    queries: tuple[str, ...]  # what the rollout searched for, in order
    card_ids: tuple[str, ...]
    bank_version: int

    @property
    def question_hash(self) -> str:
        return text_hash(self.question)


def text_hash(text: str) -> str:
    """First 16 hex digits of the SHA-256 of `text` after case folding and collapsing spaces."""
    return hashlib.sha256(' '.join(text.casefold().split()).encode()).hexdigest()[:16]


def to_json(record: Any) -> dict[str, Any]:
    """A record of this module as JSON-ready data; arrays become lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.tolist()
        if isinstance(value, Mapping):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        return value

    return plain(dataclasses.asdict(record))


def document_from_json(data: Mapping[str, Any]) -> Document:
    return Document(id=data['id'], title=data['title'], text=data['text'])


def target_from_json(data: Mapping[str, Any]) -> Target:
    return Target(data['answer'], tuple(data['aliases']), data['hops'], data['source'])


def failure_from_json(data: Mapping[str, Any]) -> Failure:
    """Inverse of `to_json` for `Failure`."""
    return Failure(
        rollout_id=data['rollout_id'],
        step=data['step'],
        question=data['question'],
        target=target_from_json(data['target']),
        prediction=data['prediction'],
        evidence=tuple(document_from_json(d) for d in data['evidence']),
        queries=tuple(data['queries']),
        card_ids=tuple(data['card_ids']),
        bank_version=data['bank_version'],
    )


def problem_from_json(data: Mapping[str, Any]) -> Problem:
    """Inverse of `to_json` for `Problem`."""
    fields = {**data, 'target': target_from_json(data['target']), 'materials': tuple(data['materials'])}
    return Problem(**fields)
