"""One row in the making: its ids, masks and log-probs, and what the tag protocol says of each turn.

Token in / token out: the ids that were sampled are the ids of the trajectory; nothing is decoded and encoded again. A
row knows nothing of devices; how many of its tokens the slots hold is all that it remembers of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sesa_jax.config import ConfigError, Lengths
from sesa_jax.policy.tokenizer import Tokenizer
from sesa_jax.records import Role, Search, StopReason, Trajectory, Turn
from sesa_jax.rollout import episode

RUNNING, TAG, END, CUT = range(4)  # whether and how a turn ended: a closing tag, an end id, the budget
SEARCHED = episode.stop_state(episode.TAGS['search'][1])  # of the stop automaton


@dataclass(frozen=True)
class Request:
    """One row to roll out. `role`, `problem` and `sample` choose its random numbers."""

    role: Role
    problem_id: str
    problem: int
    sample: int
    prompt: list[int]
    temperature: float  # 0: greedy
    max_turns: int
    card_ids: tuple[str, ...] = ()
    turn_tokens: int | None = None  # sampled tokens of one turn; None: lengths.turn
    top_k: int = 0  # sample among the k most likely tokens only; 0: among all. For evaluation
    top_p: float = 1.0  # sample among the fewest tokens that hold this mass; 1: among all. For evaluation


@dataclass(frozen=True)
class Rules:
    """What a turn may cost and what its bytes mean; the same for all rows of an engine."""

    tokenizer: Tokenizer
    lengths: Lengths
    wrapper: int  # tokens of an observation without its documents

    @classmethod
    def make(cls, tokenizer: Tokenizer, lengths: Lengths) -> Rules:
        """ConfigError if not even the wrapper of an observation fits."""
        nothing = Search('', (), 'empty', 0.0)
        wrapper = sum(len(tokenizer.encode(part)) for part in episode.observation_parts(nothing)[::2])
        if lengths.observation < wrapper:
            raise ConfigError(
                f'lengths.observation is {lengths.observation} tokens, but the wrapper of an observation alone has '
                f'{wrapper}; raise it'
            )
        return cls(tokenizer, lengths, wrapper)

    def turn_tokens(self, request: Request) -> int:
        return self.lengths.turn if request.turn_tokens is None else request.turn_tokens

    def observation(self, result: Search) -> list[int]:
        """The ids that answer a search; a function of its result alone."""
        return episode.encode_observation(self.tokenizer.encode, result, self.lengths.observation)

    def check(self, request: Request) -> None:
        """ValueError for a request that cannot be played."""
        if not 0 < len(request.prompt) <= self.lengths.prompt:
            raise ValueError(
                f'the prompt of {request.role} {request.problem_id} has {len(request.prompt)} tokens; '
                f'1 to lengths.prompt = {self.lengths.prompt} are allowed'
            )
        if request.max_turns < 1 or self.turn_tokens(request) < 1:
            raise ValueError(f'{request.problem_id} needs at least one turn of one token')
        if request.top_k < 0 or not 0 < request.top_p <= 1:
            raise ValueError(f'{request.problem_id}: top_k {request.top_k} or top_p {request.top_p} is no filter')


@dataclass(eq=False)
class Row:
    """A trajectory in the making. The newest id is the one that the slots do not hold yet."""

    request: Request
    number: int  # its place in the call
    rules: Rules
    key: np.ndarray  # u32[2]
    ids: list[int] = field(default_factory=list)
    is_action: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: int = 0  # ids whose keys and values are in the slots
    state: int = 0  # of the stop automaton, in this turn
    ending: int = RUNNING  # of this turn
    turn_start: int = 0
    turns: list[Turn] = field(default_factory=list)
    searches: list[Search] = field(default_factory=list)
    stop: StopReason | None = None
    is_searching: bool = False  # its turn ended with the tag of a search, and it has no result yet

    def __post_init__(self) -> None:
        self.append(self.request.prompt)
        self.turn_start = len(self.ids)

    @property
    def prompt_length(self) -> int:
        """Prompt tokens that the slots hold: all but the newest, which is the first to be fed."""
        return len(self.request.prompt) - 1

    @property
    def own(self) -> int:
        """Tokens behind the prompt that the slots hold."""
        return self.cached - self.prompt_length

    @property
    def pending(self) -> list[int]:
        """What the slots must still take in before the row can decode."""
        return self.ids[self.cached : -1]

    @property
    def left(self) -> int:
        """Tokens left of the response budget."""
        return len(self.request.prompt) + self.rules.lengths.response - len(self.ids)

    @property
    def room(self) -> int:
        """Tokens that may still be sampled in this turn: what is left of its budget and of the response's."""
        return min(self.rules.turn_tokens(self.request) - (len(self.ids) - self.turn_start), self.left)

    @property
    def is_over(self) -> bool:
        """Whether nothing follows; its last turn may still have to be closed."""
        return not self.is_searching and (self.stop is not None or self.ending != RUNNING)

    def append(self, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Sampled ids with their log-probs, or an observation."""
        self.ids += ids
        self.is_action += [logprobs is not None] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs

    def sampled(self, ids: Sequence[int], logprobs: Sequence[float], state: int, ending: int) -> None:
        """What a chunk added. FloatingPointError when the policy gave no number."""
        self.append(ids, logprobs)
        if not np.isfinite(logprobs).all():
            raise FloatingPointError(
                f'the policy gave logits that are not numbers to {self.request.role} {self.request.problem_id}'
            )
        self.cached, self.state, self.ending = len(self.ids) - 1, state, ending
        # Known without reading the turn: only `</search>`, in time, can be followed by anything.
        is_last = len(self.turns) + 1 == self.request.max_turns
        self.is_searching = ending == TAG and state == SEARCHED and not is_last and self.left > self.rules.wrapper

    def close_turn(self) -> None:
        """Read what the turn was, and whether the row ends with it; else its search is to be made."""
        start, end = self.turn_start, len(self.ids)
        text = episode.text_of(self.ids[start:end], self.rules.tokenizer.token_bytes)
        kind, content = episode.parse_turn(text, self.request.role)
        self.turns.append(Turn(kind, content, start, end))
        is_last = len(self.turns) == self.request.max_turns
        self.stop = episode.after_turn(kind, is_cut=self.ending == CUT, is_last=is_last)
        if self.stop is None and self.left <= self.rules.wrapper:
            self.stop = 'length'  # no result could be shown and answered: the search is not made
        self.state, self.ending = 0, RUNNING

    def observe(self, result: Search, ids: list[int]) -> int:
        """Append the result of the row's search, with `Rules.observation` of it, and return how many tokens it has; the
        row ends when there was none, or no room is left to go on."""
        self.is_searching = False
        self.searches.append(result)
        if result.outcome == 'outage':
            self.stop = 'outage'
            return 0
        if len(ids) >= self.left:
            self.stop = 'length'
            return 0
        self.append(ids)
        self.turn_start = len(self.ids)
        return len(ids)

    def trajectory(self, weights_version: int, bank_version: int) -> Trajectory:
        assert self.stop is not None
        return Trajectory(
            role=self.request.role,
            problem_id=self.request.problem_id,
            sample=self.request.sample,
            ids=np.array(self.ids, np.int32),
            is_action=np.array(self.is_action, bool),
            logprobs=np.array(self.logprobs, np.float32),
            prompt_length=len(self.request.prompt),
            turns=tuple(self.turns),
            searches=tuple(self.searches),
            card_ids=self.request.card_ids,
            stop_reason=self.stop,
            weights_version=weights_version,
            bank_version=bank_version,
        )
