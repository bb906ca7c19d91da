"""A few rollouts of a run as text that a person can read, action by action, observation by observation.

Made from the run's files: `rollouts/`, `questions/` and, for the full text, the `tokenizer.json` that the trainer puts
into the run folder. Text comes from models and documents; it is cleaned of control characters here and escaped by who
shows it. Left out: judging (the outcomes stand in the questions' file).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from sesa_jax.records import Trajectory
from sesa_jax.rollout.trajectory import read_trajectories
from sesa_jax.run.folder import RunFolder
from sesa_jax.run.questions import read_questions
from sesa_jax.run.visible import clean

MAX_CHARACTERS = 4000
"""Longest piece of text that is shown; the cut is marked."""

Decode = Callable[[Sequence[int]], str]


class Segment(NamedTuple):
    kind: str  # 'prompt', 'action' or 'observation'
    text: str


class Shown(NamedTuple):
    """One rollout for showing."""

    id: str
    role: str
    step: int
    outcome: str  # 'correct', 'wrong', ...; '' where none was recorded
    question: str
    answer: str  # the gold answer
    prediction: str
    stop_reason: str
    weights_version: int
    bank_version: int
    card_ids: tuple[str, ...]
    segments: tuple[Segment, ...]


def rollout_steps(folder: RunFolder) -> list[int]:
    """Steps whose rollouts are on disk, in order."""
    names = (
        path.name.removeprefix('step_').removesuffix('.jsonl.gz') for path in folder.rollouts.glob('step_*.jsonl.gz')
    )
    return sorted(int(name) for name in names if name.isdigit())


def examples(folder: RunFolder, step: int, *, solver: int = 4, challenger: int = 2) -> list[Shown]:
    """A few rollouts of a step: successes beside failures on the same question where there are such, then others."""
    trajectories = read_trajectories(folder.rollouts_file(step))
    questions = questions_of(folder, step)
    decode = decoder(folder)
    solved = [t for t in trajectories if t.role == 'solver']
    asked = [t for t in trajectories if t.role == 'challenger']
    contrasts = _contrasts(solved, questions)
    chosen = {t.rollout_id for t in contrasts}
    others = sorted((t for t in solved if t.rollout_id not in chosen), key=lambda t: t.sample)  # problems side by side
    picked = [*contrasts, *others][:solver]
    finished = [t for t in asked if t.stop_reason == 'question']
    failed = [t for t in asked if t.stop_reason != 'question']
    picked += [*finished[: challenger - bool(failed)], *failed][:challenger]
    return [show(t, step, questions.get(t.problem_id, {}), decode) for t in picked]


def questions_of(folder: RunFolder, step: int) -> dict[str, dict[str, Any]]:
    """Rows of the step's questions file by problem id; empty where the run wrote none."""
    file = folder.questions_file(step)
    return {row['id']: row for row in read_questions(file)} if file.exists() else {}


def decoder(folder: RunFolder) -> Decode | None:
    """Ids to text by the run's own tokenizer; None if the run folder has none."""
    if not folder.tokenizer.exists():
        return None
    tokenizer = Tokenizer.from_file(str(folder.tokenizer))
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


def show(trajectory: Trajectory, step: int, question: Mapping[str, Any], decode: Decode | None) -> Shown:
    """A trajectory as text. Without `decode`: content of each turn and documents, no prompt, no thoughts."""
    outcome = outcome_of(trajectory, question)
    # A challenger's slot may have been filled by an earlier question; its own stands in its last tag.
    asked = question.get('question', '') if trajectory.role == 'solver' else trajectory.final or ''
    segments = _decoded(trajectory, decode) if decode else _from_turns(trajectory)
    return Shown(
        id=trajectory.rollout_id,
        role=trajectory.role,
        step=step,
        outcome=outcome.get('kind', ''),
        question=_cut(asked),
        answer=_cut((question.get('target') or {}).get('answer', '')),
        prediction=_cut(outcome.get('prediction', '') or trajectory.final or ''),
        stop_reason=trajectory.stop_reason,
        weights_version=trajectory.weights_version,
        bank_version=trajectory.bank_version,
        card_ids=trajectory.card_ids,
        segments=tuple(Segment(kind, _cut(text)) for kind, text in segments if text.strip()),
    )


def _contrasts(solved: Sequence[Trajectory], questions: Mapping[str, Mapping[str, Any]]) -> list[Trajectory]:
    """For each problem with both outcomes, one success and one failure."""
    found = []
    for name in dict.fromkeys(t.problem_id for t in solved):
        kinds = {}
        for t in solved:
            if t.problem_id == name:
                kinds.setdefault(outcome_of(t, questions.get(name, {})).get('kind'), t)
        if 'correct' in kinds and 'wrong' in kinds:
            found += [kinds['correct'], kinds['wrong']]
    return found


def outcome_of(trajectory: Trajectory, question: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the questions file says of a solver rollout: its kind, reward and prediction; empty where it says nothing."""
    outcomes = question.get('outcomes', ()) if trajectory.role == 'solver' else ()
    return outcomes[trajectory.sample] if trajectory.sample < len(outcomes) else {}


def _decoded(trajectory: Trajectory, decode: Decode) -> Iterable[tuple[str, str]]:
    start = trajectory.prompt_length
    yield 'prompt', decode(trajectory.ids[:start].tolist())
    rest = trajectory.is_action[start:]
    edges = [0, *(np.flatnonzero(np.diff(rest)) + 1).tolist(), len(rest)] if len(rest) else [0]
    for begin, end in itertools.pairwise(edges):
        kind = 'action' if rest[begin] else 'observation'
        yield kind, decode(trajectory.ids[start + begin : start + end].tolist())


def _from_turns(trajectory: Trajectory) -> Iterable[tuple[str, str]]:
    searches = iter(trajectory.searches)
    for turn in trajectory.turns:
        yield 'action', f'{turn.kind}: {turn.content}'
        if turn.kind == 'search' and (search := next(searches, None)) is not None:
            yield 'observation', search.text or f'({search.outcome})'


def _cut(text: str) -> str:
    text = clean(text).strip()
    return text if len(text) <= MAX_CHARACTERS else f'{text[:MAX_CHARACTERS]} … ({len(text) - MAX_CHARACTERS} more)'


def using_card(folder: RunFolder, card_id: str) -> Iterable[tuple[int, Trajectory, str]]:
    """Each solver rollout of the run that was shown the card, with its step and outcome, in order."""
    for step in rollout_steps(folder):
        questions = questions_of(folder, step)
        for t in read_trajectories(folder.rollouts_file(step)):
            if t.role == 'solver' and card_id in t.card_ids:
                yield step, t, outcome_of(t, questions.get(t.problem_id, {})).get('kind', '')
