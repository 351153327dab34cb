"""A hundred replicas and a million requests, simulated: what each way to choose a replica does to caches and queues.

What is real: the page pool of an engine (`PagePool`), one a replica, and the routing rules (`routing.py`), beside rules
that other routers have. What is assumed, for lack of a hundred machines:

- Conversations begin at random (Poisson) at the rate that gives `--requests` in `--seconds`. Each begins with one of
  `--systems` system prompts, the n-th as likely as 1/n, and has 1 to 2 * `--turns` - 1 turns. A person reads and writes
  for 20 seconds on average (exponential) before the next turn, whose prompt is all that was said.
- All lengths are whole pages of 64 tokens: a system prompt has 16, a turn 1 to 4, an answer 2 to 8.
- A replica computes prompts one after the other, `--prefill` tokens a second, without those that its pool holds. It
  then decodes: a token takes 8 ms and 0.05 ms more for each sequence that runs, as many as there are when it begins.
  Prompts do not slow decoding down. Those of an 8B model on an H100 are of that order; none of it was measured here.
- A replica runs `--max-num-seqs` at once, and reserves the pages of an answer when it begins. Others wait their turn.
- A router knows at once what it has sent and what has ended, and is one alone: several would each know a part.

    python benchmarks/fleet.py [--replicas 100] [--requests 1000000] [--rules prefix turn two least] [--json FILE]
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.engine.core.pages import PagePool
from jaxllm.engine.messages import EngineRequest
from jaxllm.engine.scale.routing import Policy, Replica, nodes_of, prefix_first

PAGE_TOKENS = 64
SYSTEM_PAGES, TURN_PAGES, ANSWER_PAGES = 16, (1, 4), (2, 8)
THINK_SECONDS = 20.0
STEP_SECONDS, SEQUENCE_SECONDS = 0.008, 0.00005
STEP_PAGES = 32
"""Of prompts, in one step: by which the routing rule weighs them against sequences."""


def in_turn() -> Policy:
    """Each in its turn."""
    turns = count()
    return lambda request, replicas: replicas[next(turns) % len(replicas)]


def two_at_random() -> Policy:
    """The less busy one of two that are drawn, as Ray Serve chooses."""
    dice = random.Random(2)
    return lambda request, replicas: min(dice.sample(replicas, 2), key=lambda replica: replica.load)


def least_busy(request: EngineRequest, replicas: Sequence[Replica]) -> Replica:
    """Who has the least to do, whatever it holds."""
    return min(replicas, key=lambda replica: replica.load)


RULES: dict[str, Callable[[], Policy]] = {
    "prefix": lambda: prefix_first,
    "turn": in_turn,
    "two": two_at_random,
    "least": lambda: least_busy,
}


@dataclass
class Conversation:
    """What was said so far, a number for each page, and the turns that are left."""

    said: list[int]
    turns: int
    dice: random.Random


@dataclass(eq=False)
class Turn:
    """One request; seconds of the simulation."""

    request: EngineRequest
    conversation: Conversation
    answer: list[int]
    arrival: float
    computed: int = 0
    node: Any = None
    pages: list[int] = field(default_factory=list)


class Server:
    """A replica: its pool, its queue and its clock."""

    def __init__(self, number: int, arguments: argparse.Namespace):
        self.pool = PagePool(arguments.pages + 1, 1)
        self.routed = Replica(number, num_pages=arguments.pages, page_size=1, step_tokens=STEP_PAGES)
        self.waiting: deque[Turn] = deque()
        self.running = 0
        self.prefill_free = 0.0
        self.prompt = self.cached = self.busy_prefill = 0.0
        self.requests = 0
        self._most = arguments.max_num_seqs
        self._page_seconds = PAGE_TOKENS / arguments.prefill

    def begin(self, turn: Turn, now: float) -> float | None:
        """When its first token comes; None where there is no room for it yet."""
        if self.running == self._most:
            return None
        prompt = turn.request.prompt_token_ids
        found, node = self.pool.acquire_prefix(prompt[:-1])  # the last page is computed, for there the answer begins
        new = self.pool.allocate(len(prompt) + len(turn.answer) - len(found))
        if new is None:
            self.pool.release(found)
            return None
        turn.pages, turn.node, turn.computed = found + new, node, len(prompt) - len(found)
        self.running += 1
        self.requests += 1
        self.prompt += len(prompt)
        self.cached += len(found)
        seconds = turn.computed * self._page_seconds
        self.busy_prefill += seconds
        self.prefill_free = max(now, self.prefill_free) + seconds
        return self.prefill_free

    def register(self, turn: Turn, pages: Sequence[int], tokens: Sequence[int]) -> None:
        """What was computed can be found from now on."""
        for page, token in zip(pages, tokens, strict=True):
            turn.node = self.pool.register(page, turn.node, (token,))

    def decode_seconds(self, turn: Turn) -> float:
        return len(turn.answer) * PAGE_TOKENS * (STEP_SECONDS + self.running * SEQUENCE_SECONDS)

    def end(self, turn: Turn) -> None:
        self.register(turn, turn.pages[len(turn.request.prompt_token_ids) :], turn.answer)
        self.pool.release(turn.pages)
        self.running -= 1


class Fleet:
    """The simulation of one rule. Two of them see the same conversations begin, with the same words."""

    def __init__(self, arguments: argparse.Namespace, policy: Policy):
        self._arguments = arguments
        self._policy = policy
        self.servers = [Server(number, arguments) for number in range(arguments.replicas)]
        self._replicas = [server.routed for server in self.servers]
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order, self._names, self._words = count(), count(), count()
        self._dice = random.Random(0)
        self._weights = list(accumulate(1 / rank for rank in range(1, arguments.systems + 1)))
        self._systems = [[self._word() for _ in range(SYSTEM_PAGES)] for _ in range(arguments.systems)]
        self._left = arguments.requests
        self._rate = arguments.requests / arguments.turns / arguments.seconds
        self.first_tokens: list[float] = []
        self.waits: list[float] = []
        self.end = 0.0

    def run(self) -> None:
        self._at(0.0, self._converse)
        while self._events:
            self.end, _, what, arguments = heapq.heappop(self._events)
            what(self.end, *arguments)
        for server in self.servers:
            server.pool.check([])
            assert server.running == 0 and not server.waiting

    def _at(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (when, next(self._order), what, arguments))

    def _word(self) -> int:
        """The contents of a page that nobody else has."""
        return next(self._words)

    def _converse(self, now: float) -> None:
        if self._left <= 0:
            return
        turns = min(self._dice.randint(1, 2 * self._arguments.turns - 1), self._left)
        self._left -= turns
        (system,) = self._dice.choices(self._systems, cum_weights=self._weights)
        self._say(now, Conversation(list(system), turns, random.Random(self._dice.random())))
        self._at(now + self._dice.expovariate(self._rate), self._converse)

    def _say(self, now: float, conversation: Conversation) -> None:
        dice = conversation.dice
        conversation.said += [self._word() for _ in range(dice.randint(*TURN_PAGES))]
        answer = [self._word() for _ in range(dice.randint(*ANSWER_PAGES))]
        request = EngineRequest(request_id=str(next(self._names)), prompt_token_ids=list(conversation.said))
        turn = Turn(request, conversation, answer, now)
        chosen = self._policy(request, self._replicas)
        chosen.begin(request, nodes_of(request, 1))
        server = self.servers[chosen.number]
        server.waiting.append(turn)
        self._admit(now, server)

    def _admit(self, now: float, server: Server) -> None:
        while server.waiting and (first := server.begin(server.waiting[0], now)) is not None:
            turn = server.waiting.popleft()
            self.waits.append(now - turn.arrival)
            self._at(first, self._first_token, server, turn)

    def _first_token(self, now: float, server: Server, turn: Turn) -> None:
        prompt = turn.request.prompt_token_ids
        held = len(prompt) - turn.computed
        server.register(turn, turn.pages[held : len(prompt)], prompt[held:])
        server.routed.computed(turn.request.request_id)
        self.first_tokens.append(now - turn.arrival)
        self._at(now + server.decode_seconds(turn), self._answered, server, turn)

    def _answered(self, now: float, server: Server, turn: Turn) -> None:
        server.end(turn)
        server.routed.end([turn.request.request_id])
        conversation = turn.conversation
        conversation.said += turn.answer
        conversation.turns -= 1
        if conversation.turns:
            self._at(now + conversation.dice.expovariate(1 / THINK_SECONDS), self._say, conversation)
        self._admit(now, server)


def measure(arguments: argparse.Namespace, rule: str) -> dict[str, Any]:
    began = time.perf_counter()
    fleet = Fleet(arguments, RULES[rule]())
    fleet.run()
    servers = fleet.servers
    work = np.array([server.busy_prefill for server in servers])
    return {
        "rule": rule,
        "requests": len(fleet.first_tokens),
        "cached_share": sum(server.cached for server in servers) / sum(server.prompt for server in servers),
        "busiest": float(work.max() / work.mean()),
        "prefill_share": float(work.mean() / fleet.end),
        "first_token_seconds": [float(np.percentile(fleet.first_tokens, at)) for at in (50, 99)],
        "waited_share": float(np.mean(np.array(fleet.waits) > 0)),
        "wait_seconds_p99": float(np.percentile(fleet.waits, 99)),
        "simulated_seconds": fleet.end,
        "took_seconds": time.perf_counter() - began,
    }


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=2400.0)
    parser.add_argument("--systems", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5, help="of a conversation, on average")
    parser.add_argument("--pages", type=int, default=2000, help="of 64 tokens, in the KV cache of a replica")
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--prefill", type=float, default=20_000.0, help="tokens a second")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=[*RULES])
    parser.add_argument("--json", type=Path)
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    found = []
    print("rule     cached   busiest/mean  prefill busy  first token p50    p99   waited  wait p99   (took)")
    for rule in arguments.rules:
        one = measure(arguments, rule)
        found.append(one)
        half, most = one["first_token_seconds"]
        print(
            f"{rule:8} {one['cached_share']:6.1%} {one['busiest']:13.2f} {one['prefill_share']:13.1%} "
            f"{half * 1000:12.0f} ms {most * 1000:6.0f} ms {one['waited_share']:7.1%} {one['wait_seconds_p99']:7.2f} s "
            f"({one['took_seconds']:.0f} s)",
            flush=True,
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
