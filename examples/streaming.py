"""Answers that arrive token by token, two at the same time.

python examples/streaming.py
"""

import asyncio

from penstock import AsyncLLM


async def ask(llm: AsyncLLM, question: str) -> None:
    pieces = [delta.text async for delta in llm.chat([{"role": "user", "content": question}], max_tokens=40, seed=0)]
    print(f"{question} -> {len(pieces)} pieces: {''.join(pieces)}")


async def main() -> None:
    async with AsyncLLM() as llm:
        await asyncio.gather(ask(llm, "Book me a hotel in Boston."), ask(llm, "I need a bus to Fresno."))


asyncio.run(main())
