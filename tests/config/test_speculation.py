"""What --speculative-config may say."""

from __future__ import annotations

import pytest

from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions
from penstock.config.resolve import validate
from penstock.config.speculation import Speculation, speculation


def test_what_is_said() -> None:
    assert speculation(None) is None
    assert speculation('{"method": "suffix"}') == Speculation("suffix")
    asked = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 3}'
    assert speculation(asked) == Speculation("ngram", 5, 3, 5)
    assert speculation('{"model": "[ngram]", "prompt_lookup_max": 1}') == Speculation("ngram", 12, 1, 1)
    of_model = Speculation("draft_model", 4, model="m")
    assert speculation('{"method": "draft_model", "model": "m"}') == speculation('{"model": "m"}') == of_model
    asked = '{"model": "m", "num_speculative_tokens": 7, "draft_min": 2, "draft_p_min": 0.5}'
    assert speculation(asked) == Speculation("draft_model", 7, model="m", draft_min=2, draft_p_min=0.5)
    assert speculation('{"method": "eagle3", "model": "m"}') == Speculation("eagle3", 4, model="m")
    assert speculation('{"method": "p_eagle", "model": "m"}') == Speculation("p-eagle", 4, model="m")
    assert speculation('{"method": "mtp", "num_speculative_tokens": 3}') == Speculation("mtp", 3)
    assert speculation('{"method": "draft-eagle3", "model": "m"}') == Speculation("eagle3", 4, model="m")
    assert speculation('{"method": "ngram-simple"}') == Speculation("ngram")
    assert speculation('{"method": "none", "model": "m"}') is None
    assert speculation('{"method": "lookahead"}') == Speculation("lookahead", 8)
    asked = '{"method": "lookahead", "num_speculative_tokens": 5, "max_ngram_size": 3}'
    assert speculation(asked) == Speculation("lookahead", 5, max_ngram_size=3)
    assert speculation('{"method": "suffix", "adaptive": false}') == Speculation("suffix", adaptive=False)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("suffix", "a JSON object"),
        ("[1]", "a JSON object"),
        ("[" * 100_000, "a JSON object"),
        ("{}", "method is null"),
        ('{"method": "magic"}', 'or redrafter or self or ngram or suffix or lookahead, but method is "magic"'),
        ('{"method": "dflash", "model": "m"}', "dflash is not here yet"),
        ('{"method": "eagle3"}', "model, the draft model's folder, .gguf file or name, but it is null"),
        ('{"method": "medusa", "model": "m", "prompt_lookup_min": 2}', "but not prompt_lookup_min"),
        ('{"method": "suffix", "num_speculative_tokens": 0}', "num_speculative_tokens from 1 to 32"),
        ('{"method": "suffix", "num_speculative_tokens": true}', "num_speculative_tokens from 1 to 32"),
        ('{"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}', "prompt_lookup_max from 4 to 64"),
        ('{"method": "ngram", "prompt_lookup_max": "3"}', "prompt_lookup_max from"),
        ('{"method": "suffix", "depth": 3}', "but not depth"),
        ('{"method": "suffix", "adaptive": 1}', "adaptive true or false"),
        ('{"method": ["suffix"]}', "method draft_model or eagle3 or"),
        ('{"method": "draft_model"}', "model, the draft model's folder, .gguf file or name, but it is null"),
        ('{"model": 5}', "model, the draft model's folder, .gguf file or name, but it is 5"),
        ('{"model": "m", "draft_min": 5}', "draft_min from 0 to 4"),
        ('{"model": "m", "draft_p_min": 1.5}', "draft_p_min from 0 to 1, but it is 1.5"),
        ('{"model": "m", "prompt_lookup_min": 2}', "but not prompt_lookup_min"),
        ('{"method": "suffix", "model": "m"}', "but not model"),
        ('{"method": "self", "model": "m"}', "but not model"),
        ('{"method": "lookahead", "max_ngram_size": 1}', "max_ngram_size from 2 to 33, but it is 1"),
        ('{"method": "lookahead", "prompt_lookup_min": 2}', "but not prompt_lookup_min"),
        ('{"method": "self", "layers": 0}', "layers from 1 to 1024, but it is 0"),
    ],
)
def test_what_is_refused_and_how(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match="--speculative-config is") as refusal:
        validate(EngineOptions(speculative_config=text))
    assert told in str(refusal.value)
