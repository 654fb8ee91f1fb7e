"""Drafters by the names of `--speculative-config`."""

from __future__ import annotations

from penstock.config.options import EngineOptions
from penstock.config.speculation import Speculation, speculation
from penstock.core.policies.step_cost import LearnedStepCost
from penstock.runtime.drafters.depths import FixedDepths
from penstock.runtime.drafters.drafter import Drafter
from penstock.runtime.drafters.drafting import Drafting
from penstock.runtime.drafters.lookahead import LookaheadDrafter
from penstock.runtime.drafters.lookup import NgramDrafter, SuffixDrafter
from penstock.runtime.drafters.priced_depths import PricedDepths


def drafting_of(options: EngineOptions, drafter: Drafter | None = None) -> Drafting:
    """The drafter that options ask for, and who decides how much of its drafts is verified; of another one all is."""
    asked = speculation(options.speculative_config)
    if drafter is not None or asked is None:
        return Drafting(drafter)
    cost = LearnedStepCost()
    depths = PricedDepths(cost, asked.loads) if asked.adaptive else FixedDepths()
    drafting = Drafting(_drafter(asked), depths, cost, asked.num_speculative_tokens)
    if asked.method == "lookahead":
        drafting.use_tapped(LookaheadDrafter(asked.num_speculative_tokens, asked.max_ngram_size))
    return drafting


def _drafter(asked: Speculation) -> Drafter | None:
    """The drafter that is asked for; None where its model is yet to be loaded (`startup.draft`), or it reads steps."""
    if asked.loads or asked.method == "lookahead":
        return None
    most, least = asked.num_speculative_tokens, asked.prompt_lookup_min
    if asked.method == "suffix":
        return SuffixDrafter(most, least)
    return NgramDrafter(most, least, asked.prompt_lookup_max)
