"""Real assets that tests use where they are: a data package, and a folder of question files that people have."""

import importlib.metadata
import os
import pathlib

import pytest

from sesa_jax.worlds import wiki


def _has_wiki() -> bool:
    try:
        return importlib.metadata.version(wiki.PACKAGE) == wiki.VERSION
    except importlib.metadata.PackageNotFoundError:
        return False


needs_wiki = pytest.mark.skipif(not _has_wiki(), reason=f'needs a package: {wiki.INSTALL}')
QA = pathlib.Path(os.environ.get('SESA_TEST_QA', ''))
needs_qa = pytest.mark.skipif(
    not os.environ.get('SESA_TEST_QA'), reason='SESA_TEST_QA does not name a folder of question files'
)
