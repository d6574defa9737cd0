import pytest
import torch

from titan_launch.config.sections.data import SyntheticData
from titan_launch.core.errors import ConfigError
from titan_launch.data.sources import SampleSource, build_source
from titan_launch.data.tokenizers import ByteTokenizer


def build(seq_len: int = 64, **keys: float) -> SampleSource:
    config = SyntheticData.model_validate({"kind": "synthetic", "num_samples": 50, "vocab_size": 16, **keys})
    return build_source(config, ByteTokenizer(), seq_len)


def successors(source: SampleSource) -> dict[int, int]:
    """Return the next token of each token, from samples without noise."""
    pairs: dict[int, int] = {}
    for i in range(len(source)):
        for token, following in zip(*(t.tolist() for t in source[i]), strict=True):
            assert pairs.setdefault(token, following) == following
    return pairs


def test_a_sample_is_a_pure_function_of_seed_and_index() -> None:
    one, again, other = build(), build(), build(seed=1)
    assert all(torch.equal(one[i][0], again[i][0]) for i in (3, 0, 49))
    assert not torch.equal(one[0][0], one[1][0])
    assert not torch.equal(one[0][0], other[0][0])
    assert one.describe() == "50 random sequences of 64 tokens, with a vocabulary of 16"
    assert one.fingerprint(0) is None
    with pytest.raises(IndexError):
        one[50]


def test_the_samples_of_a_seed_do_not_change_between_releases() -> None:
    assert build(seq_len=8, seed=-1)[2][0].tolist() == [3, 11, 9, 14, 10, 8, 2, 1]


def test_targets_are_the_next_tokens() -> None:
    inputs, targets = build()[7]
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (64,)
    assert torch.equal(inputs[1:], targets[:-1])


def test_without_noise_every_token_follows_from_the_one_before_by_the_same_rule_for_all_seeds() -> None:
    rule = successors(build(noise=0.0))
    assert sorted(rule) == sorted(rule.values()) == list(range(16))
    assert successors(build(noise=0.0, seed=5)) == rule


def test_noise_breaks_the_rule_at_the_configured_rate() -> None:
    rule = successors(build(noise=0.0))
    source = build(seq_len=1000, noise=0.4)
    broken = sum(
        rule[token] != following
        for i in range(len(source))
        for token, following in zip(*(t.tolist() for t in source[i]), strict=True)
    )
    assert broken / 50_000 == pytest.approx(0.4 * 15 / 16, abs=0.01)


def test_more_tokens_than_the_tokenizer_knows_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        build(vocab_size=258)
    assert str(caught.value) == "data.vocab_size: exceeds the tokenizer's vocabulary size; set at most 257"
