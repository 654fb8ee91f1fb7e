"""What is told of a running engine for metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for metrics; counters grow since the engine started, or its client where that restarts engines.

    Attributes:
        running, waiting: sequences in the batch, sequences queued.
        waiting_tokens: tokens of queued sequences.
        waiting_seconds: how long what waits is expected to take, as the engine's client reckons.
        blocks_used, blocks_cached, blocks_total: over all groups: referenced by sequences, only by the prefix
            tree, and all that exist.
        slots_used, slots_allocated: token slots written and allocated by running sequences (group 0).
        steps, prompt_tokens, cached_tokens, generated_tokens, preemptions, finished, cancelled, failed: counters.
        prefix_queries: prompt tokens looked up in the prefix tree; prefix_hits: of those, found.
        miss_reasons: (reason, count) of lookups that found less than the whole prompt.
        held_back: (gate, count) of steps in which a gate kept a sequence in the queue.
        drafts: times that a sequence's drafts were verified.
        drafted_tokens, accepted_tokens: tokens of these, and those of them that were right.
        drafter_failures: times a drafter failed and was switched off.
        draft_decisions: (reason, count) of why sequences had the drafts they had, one for each that drew in a step.
        accepted_now, accepted_usually: accepted drafts of a verified proposal, of the last few hundred and thousands.
        accepted_by_position: (position, count) of verified proposals whose drafts were accepted up to that one, from 0.
        failed_loads: sequences that began anew because blocks could not be loaded from a lower tier.
        kv_below: (what, count) of blocks that were copied to a lower tier and back: saved, loaded, failed, dropped for
            others; and of loads that were declined, because computing is sooner done.
        kv_below_blocks, kv_below_places: copies that a lower tier has, and how many it has room for; over all groups.
        kv_events: (what, count) of what is told of blocks beyond the process: batches published, events dropped.
        restarts, resumed: times an engine was started in place of one that died, and requests that went on there.
        paused: 1 while the engine is told to hold still, 2 while it computes nothing at all (`keep`, `retract`), 3 as 1
            while some that came before that still wait to run.
        plan_seconds, commit_seconds, build_seconds, forward_seconds, sample_seconds: time in the parts of all steps.
        stages_seconds, stages_computed_seconds: time in which there were steps for the stages of a pipeline, and the
            part of it in which these computed, on an average of them.
        ranks_seconds: of steps, in which this process waited for other ranks or took what they gave.
        engines: of several engines that serve one model, each one's; () of one.
    """

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    waiting_seconds: float = 0.0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_total: int = 0
    slots_used: int = 0
    slots_allocated: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    miss_reasons: tuple[tuple[str, int], ...] = ()
    held_back: tuple[tuple[str, int], ...] = ()
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafter_failures: int = 0
    draft_decisions: tuple[tuple[str, int], ...] = ()
    accepted_now: float = 0.0
    accepted_usually: float = 0.0
    accepted_by_position: tuple[tuple[int, int], ...] = ()
    failed_loads: int = 0
    kv_below: tuple[tuple[str, int], ...] = ()
    kv_below_blocks: int = 0
    kv_below_places: int = 0
    kv_events: tuple[tuple[str, int], ...] = ()
    restarts: int = 0
    resumed: int = 0
    paused: int = 0
    plan_seconds: float = 0.0
    commit_seconds: float = 0.0
    build_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    stages_seconds: float = 0.0
    stages_computed_seconds: float = 0.0
    ranks_seconds: float = 0.0
    engines: tuple[EngineStats, ...] = ()
