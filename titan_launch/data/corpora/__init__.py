"""The classes of corpora, by the `kind` of their section."""

from titan_launch.data.corpora.chat import ChatCorpus, PreferenceCorpus, UnpairedPreferenceCorpus
from titan_launch.data.corpora.huggingface import HuggingFaceCorpus
from titan_launch.data.corpora.interface import Corpus
from titan_launch.data.corpora.jsonl import ClassificationCorpus, JsonlCorpus
from titan_launch.data.corpora.parquet import ParquetCorpus
from titan_launch.data.corpora.text_files import TextCorpus

CORPORA: dict[str, type[Corpus]] = {
    "text": TextCorpus,
    "jsonl": JsonlCorpus,
    "chat": ChatCorpus,
    "preferences": PreferenceCorpus,
    "unpaired_preferences": UnpairedPreferenceCorpus,
    "classification": ClassificationCorpus,
    "parquet": ParquetCorpus,
    "huggingface": HuggingFaceCorpus,
}
"""The class for each kind of corpus."""
