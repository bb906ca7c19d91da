"""The report is one file that shows what the run left, and does nothing else."""

import base64
import hashlib
import html
import html.parser
import json
import re
import shutil

import pytest

from experiments.report import main as command
from sesa_jax.config import ConfigError
from sesa_jax.run.folder import RunFolder
from sesa_jax.run.report import build, write


class Page(html.parser.HTMLParser):
    """Tags with their attributes, and the text that a person sees, by the class of the element around it."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.by_class, self._stack = [], {}, []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._stack.append((tag, dict(attrs).get('class', '')))

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        while self._stack and self._stack.pop()[0] != tag:
            pass

    def handle_data(self, data):
        for _, name in self._stack:
            self.by_class[name] = self.by_class.get(name, '') + data

    @property
    def text(self):
        return ' '.join(''.join(self.by_class.values()).split())


def test_what_a_rollout_says_is_shown_as_text_and_never_becomes_markup(made_up_run):
    raw = build(made_up_run)
    page = Page(raw)
    assert not {'script', 'img', 'iframe', 'link', 'object', 'embed', 'form', 'a'} & {tag for tag, _ in page.tags}
    assert not [a for _, attrs in page.tags for a in attrs if a.startswith('on') or a in ('src', 'href', 'style')]
    assert '<script>alert("x")</script>' in page.by_class['observation']  # as text
    assert '<script>' not in raw
    assert not re.search('[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]', raw)


def test_nothing_is_loaded_from_anywhere(made_up_run):
    raw = build(made_up_run)
    assert 'http://evil.example/a.png' in raw  # the hostile page's own text is there to be read,
    css = re.search('<style>(.*?)</style>', raw, re.S).group(1)
    assert not re.search(r'https?:|//|url\(|@import', css)  # but no address stands where a browser would follow it
    assert not [a for _, attrs in Page(raw).tags for a in attrs.values() if a and re.search('https?:|//|url', a)]


def test_the_policy_forbids_everything_but_our_own_style(made_up_run):
    raw = build(made_up_run)
    css = re.search('<style>(.*?)</style>', raw, re.S).group(1)
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    policies = [a['content'] for tag, a in Page(raw).tags if a.get('http-equiv') == 'Content-Security-Policy']
    assert policies == [f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"]
    assert 'prefers-color-scheme: dark' in css


def test_actions_and_observations_are_told_apart(made_up_run):
    page = Page(build(made_up_run))
    assert 'I think of Velmar.' in page.by_class['action']
    assert 'THOUGHT 1' in page.by_class['action']
    assert 'Doc 1 (Title: Velmar)' in page.by_class['observation']
    assert 'Doc 1' not in page.by_class['action']
    assert 'THOUGHT' not in page.by_class['observation']
    assert 'PROMPT of solver' in page.by_class['prompt']


def test_a_success_and_a_failure_on_one_question_stand_side_by_side(made_up_run):
    summaries = re.findall('<summary>(.*?)</summary>', build(made_up_run), re.S)
    said = [re.sub('<[^>]+>', '', s).split(' · ') for s in summaries]
    assert said[-1][2] == 'Who was it?'  # a challenger's own question, not the one that filled its slot
    said = [parts[:2] for parts in said]
    assert said == [
        ['solver solver:s6-p0:0', 'correct'],
        ['solver solver:s6-p0:1', 'wrong'],
        ['challenger challenger:s6-p0:0', 'stopped by question'],
    ]


def test_without_a_tokenizer_the_turns_are_shown_and_that_is_said(made_up_run):
    made_up_run.tokenizer.unlink()
    page = Page(build(made_up_run))
    assert 'has no tokenizer.json' in page.text
    assert 'search: Velmar founder' in page.by_class['action']
    assert 'PROMPT' not in page.text


def test_the_evaluation_stands_in_the_table_with_its_intervals(made_up_run):
    result = json.loads(made_up_run.evaluation.read_text())
    found = result['differences']['on-base']['total']
    raw = build(made_up_run)
    cell = f'+45.0 [{100 * found["low"]:+.1f}, {100 * found["high"]:+.1f}] p<0.001'
    assert f'<td class="shown">{html.escape(cell)}</td>' in raw
    table = raw[raw.index('Held-out evaluation') : raw.index('How the run went')]
    assert table.count('<tr') == 1 + 7
    assert 'Of 80 held-out questions the solver answers 30.0% [' in raw


def test_the_three_curves_and_the_histogram_are_drawn_from_the_metrics(made_up_run):
    raw = build(made_up_run)
    assert len(re.findall('<svg', raw)) == 4
    labels = re.findall('<title>(.*?)</title>', raw)
    assert 'all, step 5: 0.55' in labels
    assert 'valid, step 1: 0.75' in labels
    assert 'cards, step 6: 21' in labels
    assert 'step 6: 4 of 12 problems with 0 of 5 solved' in labels
    assert len([label for label in labels if label.startswith('all, ')]) == 3  # validated at steps 1, 3, 5
    assert 'the same 48 questions at each point' in raw


def test_doubts_and_config_differences_are_listed(made_up_run):
    page = Page(build(made_up_run))
    assert 'This is one seed (3)' in page.text
    assert 'fewer than 100 held-out questions' in page.text
    text = re.sub(r'\s+', ' ', re.sub('<[^>]+>', ' ', build(made_up_run)))
    assert 'optimizer.learning_rate 0.0003 1e-06' in text
    assert 'seed 3 0' in text


def test_rejected_questions_are_counted_over_the_run(made_up_run):
    assert 'leak 18, ' in build(made_up_run)


def test_the_same_run_gives_the_same_bytes(made_up_run):
    path = write(made_up_run)
    first = path.read_bytes()
    assert path == made_up_run.report
    assert write(made_up_run).read_bytes() == first


def test_a_run_without_evaluation_says_how_to_make_one(made_up_run):
    made_up_run.evaluation.unlink()
    page = Page(build(made_up_run))
    assert 'Not evaluated yet: python -m experiments.evaluate run' in page.text
    assert 'There is no evaluation' in page.text


def test_a_run_before_its_first_step_can_be_reported(made_up_run):
    for file in (made_up_run.evaluation, made_up_run.rollouts_file(6)):
        file.unlink()
    made_up_run.metrics.write_bytes(b'')
    assert '0 of 6 steps' in build(made_up_run)


def test_fields_that_a_method_lacks_are_left_out(made_up_run):
    made_up_run.metrics.write_text(
        '{"step":1,"time":{"wall":1.0}}\n{"challenger":null,"solver":{},"step":2,"time":{}}\n'
    )
    assert '2 of 6 steps' in build(made_up_run)


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('metrics.jsonl', r'lacks .*metrics\.jsonl, which the report needs'),
        ('rollouts/step_00006.jsonl.gz', r'lacks .*step_00006\.jsonl\.gz, which the report needs'),
        ('config.json', r'holds no run \(no config\.json'),
    ],
)
def test_a_missing_file_is_named(made_up_run, name, message):
    (made_up_run.path / name).unlink()
    with pytest.raises(ConfigError, match=message):
        build(RunFolder.read(made_up_run.path))
    assert not made_up_run.report.exists()


@pytest.mark.parametrize('name', ['evaluation.json', 'questions/step_00006.jsonl.gz', 'rollouts/step_00006.jsonl.gz'])
def test_a_damaged_file_is_named(made_up_run, name):
    (made_up_run.path / name).write_bytes(b'{"version": 1}')
    with pytest.raises(ConfigError, match=re.escape(name)):
        build(made_up_run)


def test_a_copy_elsewhere_gives_the_same_report(made_up_run, tmp_path):
    copy = tmp_path / 'elsewhere' / 'run'
    shutil.copytree(made_up_run.path, copy)
    assert build(RunFolder.read(copy)) == build(made_up_run)


def test_the_newest_cards_are_shown_with_their_lineage(made_up_memory):
    raw = build(made_up_memory)
    page = Page(raw)
    part = page.text[page.text.index('Founders stand') :]
    assert raw.index('<code>c00002</code>') < raw.index('<code>c00001</code>')  # newest first
    assert 'retrieved 11, helpful 11, hurt 0' in page.text
    assert 'made by rules, from solver:s3-p1:0, which had been shown c00001' in part
    assert 'failure of step 3, solver:s3-p1:0' in page.text
    assert 'searched: Velmar founder → <script>' in page.text
    assert '<script>' not in raw


def test_a_rollout_is_shown_with_the_text_of_its_cards(made_up_memory):
    page = Page(build(made_up_memory))
    assert 'card c00002when a founder is asked for: search charter roll {entity}' in page.text


def test_a_missing_or_damaged_bank_is_named(made_up_memory):
    good = made_up_memory.bank.read_bytes()
    made_up_memory.bank.write_bytes(good[:5000])
    with pytest.raises(ConfigError, match=r'bank\.db'):
        build(made_up_memory)
    for file in made_up_memory.path.glob('bank.db*'):
        file.unlink()
    with pytest.raises(ConfigError, match=r'lacks .*bank\.db, which the report needs'):
        build(made_up_memory)


def test_reporting_does_not_touch_the_bank(made_up_memory):
    before = {file.name: file.read_bytes() for file in made_up_memory.path.glob('bank.db*')}
    build(made_up_memory)
    assert {file.name: file.read_bytes() for file in made_up_memory.path.glob('bank.db*')} == before


def test_the_command_prints_the_path_and_names_what_is_wrong(made_up_run, capsys, tmp_path):
    assert command([str(made_up_run.path)]) == 0
    assert capsys.readouterr().out == f'{made_up_run.path}/report.html\n'
    assert command([str(tmp_path / 'nowhere')]) == 2
    assert capsys.readouterr().err == f'error: there is no folder {tmp_path}/nowhere\n'
