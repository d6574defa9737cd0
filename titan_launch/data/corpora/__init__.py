"""Corpora, by the `kind` of their section."""

from titan_launch.data.corpora.base import Corpus
from titan_launch.data.corpora.text import TextCorpus

CORPORA: dict[str, type[Corpus]] = {"text": TextCorpus}
"""The corpus of each kind of data that can be tokenized: when a run starts, or by `titan-launch prepare`."""
