"""Jobs that go on without their client: each is counted until it has ended, however it ends."""

from __future__ import annotations

import asyncio

from penstock.server.dialects.responses.service.background import Job, Jobs
from penstock.server.lifecycle import Lifecycle


def test_a_job_cancelled_before_its_first_turn_leaves_nothing() -> None:
    async def scenario() -> None:
        lifecycle, begun = Lifecycle(), False
        jobs, job = Jobs(lifecycle), Job("owner", {})

        async def work() -> None:
            nonlocal begun
            begun = True

        jobs.start("a", job, work)
        assert lifecycle.in_flight == 1 and jobs.get("owner", "a") is job
        await job.cancel()
        assert not begun
        assert lifecycle.in_flight == 0 and jobs.get("owner", "a") is None
        assert [event async for event in job.follow()] == []

    asyncio.run(scenario())
