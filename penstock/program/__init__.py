"""Programs: prompts that are written piece by piece, generate within themselves, choose, fork and join.

After SGLang's front-end language (Zheng et al., 2312.07104). A piece returns at once and runs in order with the state's
other pieces; reading a result waits for it. What a state has said is kept in tokens, and the states that fork from it
find them in the prefix cache: a common prefix is computed once, also when all of them start together.

>>> from penstock import LLM
>>> from penstock.program import gen, select
>>> with LLM() as llm:
...     state = llm.program() + "Two tips for a healthy life."
...     forks = state.fork(2)
...     for number, fork in enumerate(forks, 1):
...         fork += f" Tip {number}:" + gen("tip", max_tokens=24, stop="\\n")
...     forks.join()
...     state += " The better one is tip" + select("best", [" 1", " 2"])
...     print(state["tip"], state["best"])
"""

from __future__ import annotations

from penstock.program.pieces import assistant as assistant
from penstock.program.pieces import gen as gen
from penstock.program.pieces import select as select
from penstock.program.pieces import system as system
from penstock.program.pieces import user as user
from penstock.program.state import Forks as Forks
from penstock.program.state import Function as Function
from penstock.program.state import Host as Host
from penstock.program.state import State as State
from penstock.program.state import function as function
