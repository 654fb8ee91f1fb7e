"""Several prompts in one batch, and a chat, without a server.

python examples/offline.py [MODEL]
"""

import sys

from penstock import LLM, SamplingParams

with LLM(*sys.argv[1:2]) as llm:
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    for completion in llm.generate(["I would like to book", "The weather in Paris"], greedy):
        print(repr(completion.text), completion.outputs[0].finish_reason.value)

    question = [{"role": "user", "content": "Find me a place to eat in San Jose."}]
    print(llm.chat(question, temperature=0, max_tokens=60)[0].text)

    # Three answers to one question: the prompt is computed once.
    for output in llm.chat([{"role": "user", "content": "Hello!"}], n=3, seed=1, max_tokens=20)[0].outputs:
        print(output.index, output.text)
    print("tokens taken from the prefix cache:", llm.stats().cached_tokens)
